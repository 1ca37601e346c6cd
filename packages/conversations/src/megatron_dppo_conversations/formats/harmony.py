"""Format of gpt-oss (Harmony): a response is messages of the channels ``analysis``, ``commentary`` and ``final``."""

import re
from typing import NamedTuple

from megatron_dppo_conversations.formats.base import ParsedResponse, ToolCall, make_tool_call
from megatron_dppo_conversations.formats.json_values import parse_json
from megatron_dppo_conversations.formats.schemas import Tools, has_tool

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TAG = re.compile(r"(<\|(?:start|channel|message|end|call|return)\|>)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=[\s<]|\Z)")
_FUNCTIONS = "functions."


class HarmonyMessage(NamedTuple):
    """One message of a response."""

    role: str
    channel: str
    """Channel; empty if the header names none."""
    recipient: str
    """Recipient (``to=``) in the role or behind the channel; empty if there is none."""
    body: str
    end: str
    """Tag that ends the message; empty if it is cut off."""

    @property
    def is_answer(self) -> bool:
        """True if the message is for the user: of the channel ``final``, or without channel."""
        return self.role == "assistant" and not self.recipient and self.channel in ("final", "")


def read_harmony(text: str) -> list[HarmonyMessage]:
    """Return the messages of a response; empty if it has no tags.

    The header of the first message may stand in the prompt.
    """
    messages: list[HarmonyMessage] = []
    header = ""
    body: str | None = None

    def finish(end: str) -> None:
        nonlocal header, body
        if body is None and end and not messages:
            header, body = "", header
        if body is not None:
            role, _, behind = header.removeprefix("<|start|>").partition("<|channel|>")
            channel = _CHANNEL.search(header)
            # "assistant to=functions.f", or behind the channel.
            recipient = _RECIPIENT.search(role) or _RECIPIENT.search(behind)
            author = _RECIPIENT.sub("", role).strip() or "assistant"
            name = channel[1] if channel is not None else ""
            messages.append(HarmonyMessage(author, name, recipient[1] if recipient else "", body, end))
        header = ""
        body = None

    for part in _TAG.split(text):
        if part in _ENDS:
            finish(part)
        # A channel behind a text begins a message whose start the policy has left out.
        elif part == "<|start|>" or (part == "<|channel|>" and body is not None):
            finish("")
            header = part
        elif part == "<|message|>" and body is None:
            body = ""
        elif body is not None:
            body += part
        else:
            header += part
    finish("")
    return messages


class HarmonyFormat:
    """Thoughts are messages of the channel ``analysis``, and calls are messages to a tool, on any channel."""

    name = "gpt_oss"
    text_tokens: frozenset[str] = frozenset(
        {
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            *_ENDS,
        }
    )
    stop_tokens: tuple[str, ...] = ("<|call|>", "<|return|>")
    turn_ends: tuple[str, ...] = _ENDS
    needs_text_arguments = False

    def parse(self, text: str, tools: Tools, *, starts_in_thought: bool = False) -> ParsedResponse:
        """See ``ResponseFormat``."""
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed = 0
        messages = read_harmony(text)
        for message in messages:
            # Before the channel: the policy writes calls on ``analysis``, too.
            if message.recipient and tools:
                call = _read_call(message, tools)
                malformed += call is None
                calls += [call] if call is not None else []
            elif message.channel == "analysis":
                thoughts.append(message.body)
            elif message is messages[0] and message is not messages[-1] and not message.channel:
                thoughts.append(message.body)  # begun in the prompt
            else:
                content.append(message.body)
        if malformed:
            # A malformed call stays text, with its tags, since its channel is a part of what is wrong.
            calls = []
            content = [text]
        visible = "".join(content).strip() if messages else text
        return ParsedResponse(
            text=visible,
            content=visible,
            reasoning="\n".join(part for part in map(str.strip, thoughts) if part),
            tool_calls=tuple(calls),
            num_malformed=malformed,
        )

    def answer_text(self, text: str) -> str:
        """See ``ResponseFormat``. Everything but the answer is a thought, closed even if it is cut off."""
        parts: list[str] = []
        messages = read_harmony(text)
        thoughts: list[str] = []
        for index, message in enumerate(messages):
            is_begun = not message.channel and index == 0 < len(messages) - 1
            if not message.is_answer or is_begun:
                thoughts.append(message.body)
                continue
            parts += [_thought(thoughts), message.body]
            thoughts = []
        return "".join([*parts, _thought(thoughts)]) if messages else text

    def visible_text(self, text: str) -> str:
        """See ``ResponseFormat``. Content of messages has no channels any more."""
        return text.strip()

    def call_end(self) -> str | None:
        """See ``ResponseFormat``. The format ends a turn behind each call anyway."""
        return "<|call|>"


def _thought(parts: list[str]) -> str:
    return f"<think>{chr(10).join(parts)}</think>" if parts else ""


def _read_call(message: HarmonyMessage, tools: Tools) -> ToolCall | None:
    name = message.recipient.removeprefix(_FUNCTIONS)
    # In long contexts the policy leaves the prefix out.
    is_function = message.recipient.startswith(_FUNCTIONS) or has_tool(tools, name)
    try:
        arguments = parse_json(message.body)
    except ValueError:
        return None
    if not is_function or not name or not message.end or not isinstance(arguments, dict):
        return None
    return make_tool_call("", name, arguments)
