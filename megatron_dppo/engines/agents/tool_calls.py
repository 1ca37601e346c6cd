"""Tool calls in a response: JSON between ``<tool_call>`` and ``</tool_call>``, as Qwen's and Hermes' templates ask."""

from __future__ import annotations

import re
import secrets
from typing import Any

from megatron_dppo.engines.agents.json_values import parse_json, parse_json_prefix

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_TAG = re.compile("<tool_call>|<think>|</think>")
_THINK = "<think>"
_END_THINK = "</think>"
_SPACE = re.compile(r"\s*")
_OBJECT_OR_END = re.compile(r"\s*(\{|\Z)")


def make_tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call as chat templates expect it."""
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except ValueError:
            pass  # a model may have written it so; the template gets the text
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def split_tool_calls(text: str, *, starts_in_thought: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the first tool call, and the calls; the complete text if a call is invalid JSON.

    A call in a thought is not made. JSON is read to its end, so that a string may contain any tag. ``<tool_call>``
    without an object behind it is only mentioned.

    Args:
        text: The response.
        starts_in_thought: True if the prompt has opened the thought.
    """
    calls: list[dict[str, Any]] = []
    first = 0
    is_valid = True
    position = _end_of_thought(text, 0) if starts_in_thought else 0
    while match := _TAG.search(text, position):
        position = match.end()
        if match[0] == _THINK:
            position = _end_of_thought(text, position)
        elif match[0] == _END_THINK:
            # The thought began in the prompt: everything before was thought.
            calls = []
            is_valid = True
        # Cut off right behind its tag, a call is invalid and not only mentioned.
        elif _OBJECT_OR_END.match(text, position):
            first = first if calls else match.start()
            call, position = _read_call(text, position)
            is_valid = is_valid and call is not None
            calls += [call] if call is not None else []
    return (text[:first].strip(), calls) if calls and is_valid else (text, [])


def _end_of_thought(text: str, position: int) -> int:
    end = text.find(_END_THINK, position)
    return len(text) if end < 0 else end + len(_END_THINK)


def _read_call(text: str, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return the call whose JSON begins at a position, or None, and the position after it."""
    start = _skip_space(text, position)
    try:
        value, end = parse_json_prefix(text, start)
    except ValueError:
        return None, position
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        return None, position
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None, position
    return make_tool_call(f"call_{secrets.token_hex(12)}", value["name"], arguments), end + len(_CLOSE)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
