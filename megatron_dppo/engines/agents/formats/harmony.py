"""Format of gpt-oss (Harmony): a response is messages of the channels ``analysis``, ``commentary`` and ``final``."""

from __future__ import annotations

import re
from typing import Any

from megatron_dppo.engines.agents.formats.base import ParsedResponse, Tools, make_tool_call
from megatron_dppo.engines.agents.formats.json_values import parse_json

_MESSAGE = re.compile(
    r"(?:<\|start\|>(?P<role>[^<]*))?(?P<header>(?:(?!<\|message\|>).)*?)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=[\s<]|\Z)")
_FUNCTIONS = "functions."


class HarmonyFormat:
    """Thoughts are messages of the channel ``analysis``, and calls are messages to ``functions.NAME``."""

    name = "gpt_oss"
    text_tokens: frozenset[str] = frozenset(
        {
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        }
    )
    stop_tokens: tuple[str, ...] = ("<|call|>", "<|return|>")
    turn_ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    needs_text_arguments = False

    def parse(self, text: str, tools: Tools, *, starts_in_thought: bool = False) -> ParsedResponse:
        """See ``ResponseFormat``."""
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        malformed = 0
        matches = list(_MESSAGE.finditer(text))
        for match in matches:
            header = (match["role"] or "") + match["header"]
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if channel is not None and channel[1] == "analysis":
                thoughts.append(match["body"])
            elif recipient is None:
                content.append(match["body"])
            elif tools:
                call = _read_call(recipient[1], match["body"]) if match["end"] else None
                malformed += call is None
                calls += [call] if call is not None else []
            else:
                content.append(match["body"])
        if malformed:
            # A malformed call stays text, with its tags, since its channel is a part of what is wrong.
            calls = []
            content = [text]
        visible = "".join(content).strip() if matches else text
        return ParsedResponse(
            text=visible,
            content=visible,
            reasoning="\n".join(part for part in map(str.strip, thoughts) if part),
            tool_calls=tuple(calls),
            num_malformed=malformed,
        )

    def visible_text(self, text: str) -> str:
        """See ``ResponseFormat``. Content of messages has no channels any more."""
        return text.strip()

    def call_end(self) -> str | None:
        """See ``ResponseFormat``. The format ends a turn behind each call anyway."""
        return "<|call|>"


def _read_call(recipient: str, body: str) -> dict[str, Any] | None:
    name = recipient.removeprefix(_FUNCTIONS)
    try:
        arguments = parse_json(body)
    except ValueError:
        return None
    if not recipient.startswith(_FUNCTIONS) or not name or not isinstance(arguments, dict):
        return None
    return make_tool_call("", name, arguments)
