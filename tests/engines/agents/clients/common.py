"""Parts that all clients share: the task from standard input, the tool, the address of the endpoint, and the reward."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterable
from typing import Any

DESCRIPTION = "Adds two whole numbers."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": DESCRIPTION,
    "parameters": SCHEMA,
    "strict": False,
}
ANTHROPIC_TOOL: Any = {"name": "add", "description": DESCRIPTION, "input_schema": SCHEMA}


def task() -> dict[str, Any]:
    """Return the data row."""
    return json.load(sys.stdin)


def add(arguments: Any) -> str:
    """Run the tool. A policy may call it with anything."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    try:
        return str(int(values["a"]) + int(values["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def tool_results(calls: Iterable[Any]) -> list[dict[str, str]]:
    """Return the messages with the results of Chat Completions' tool calls."""
    return [{"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)} for call in calls]


def anthropic_base() -> str:
    """Return the address without ``/v1``."""
    return os.environ["ANTHROPIC_BASE_URL"]


def anthropic_key() -> str:
    """Return the key of the episode."""
    return os.environ["ANTHROPIC_API_KEY"]


def note(**facts: Any) -> None:
    """Append facts of the episode to the file that ``AGENTS_CLIENTS_LOG`` names."""
    with open(os.environ["AGENTS_CLIENTS_LOG"], "a") as file:
        file.write(json.dumps(facts) + "\n")


def reward(value: float) -> None:
    """Send the reward of the episode."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/reward",
        json.dumps({"reward": value}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request).close()
