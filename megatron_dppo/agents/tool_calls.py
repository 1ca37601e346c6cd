"""Tool calls in a model's own words: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen)."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from megatron_dppo.agents.requests import tool_call

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls; all of it text where a call is no such JSON."""
    blocks = list(_BLOCK.finditer(text))
    calls = [_read(block[1]) for block in blocks]
    if not blocks or None in calls:
        return text, []
    return text[: blocks[0].start()].strip(), [call for call in calls if call is not None]


def _read(block: str) -> dict[str, Any] | None:
    try:
        found = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return tool_call(f"call_{secrets.token_hex(12)}", found["name"], arguments)
