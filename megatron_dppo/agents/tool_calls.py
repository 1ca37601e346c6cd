"""Tool calls in a model's own words: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen)."""

from __future__ import annotations

import json
import secrets
from typing import Any

from megatron_dppo.agents.requests import tool_call

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls; all of it text where a call is no such JSON."""
    content, *rest = text.split(_OPEN)
    blocks = [part.split(_CLOSE)[0] for part in rest if _CLOSE in part]
    calls = [_read(block) for block in blocks]
    if not blocks or len(blocks) < len(rest) or None in calls:
        return text, []
    return content.strip(), [call for call in calls if call is not None]


def _read(block: str) -> dict[str, Any] | None:
    try:
        found = json.loads(block, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return tool_call(f"call_{secrets.token_hex(12)}", found["name"], arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
