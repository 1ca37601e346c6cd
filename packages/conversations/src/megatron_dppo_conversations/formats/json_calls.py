"""Formats whose tool calls are JSON objects: Hermes, DeepSeek, Kimi, Mistral and Llama."""

import re
from typing import Any

from megatron_dppo_conversations.formats.base import (
    ParsedResponse,
    TaggedFormat,
    ToolCall,
    call_arguments,
    make_tool_call,
    skip_space,
)
from megatron_dppo_conversations.formats.json_values import parse_json_prefix
from megatron_dppo_conversations.formats.parameter_calls import FUNCTION_GRAMMAR, read_function
from megatron_dppo_conversations.formats.schemas import Tools, has_tool


def read_arguments(text: str, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object that begins at a position, and the position after it; None if there is none."""
    try:
        value, end = parse_json_prefix(text, skip_space(text, position))
    except ValueError:
        return None, position
    return (value, end) if isinstance(value, dict) else (None, position)


class HermesFormat(TaggedFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen3's and Hermes' templates ask.

    Calls of Qwen3.5's form behind the same tag are read too, since nothing else can be meant by them.
    """

    name = "hermes"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    text_tokens = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
    # Cut off right behind its tag, a call is malformed and not only mentioned.
    start = re.compile(r"\s*(\{|<function=|<[a-z]*\Z|\Z)")

    def call_end(self) -> str | None:
        """See ``ResponseFormat``."""
        return self.close_tag

    def _unquoted_end(self) -> re.Pattern[str] | None:
        # Of calls of Qwen3.5's form.
        return FUNCTION_GRAMMAR.value_end

    def _read_block(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        start = skip_space(text, position)
        if text.startswith("<function=", start):
            call, end = read_function(text, start, tools)
        else:
            value, end = read_arguments(text, start)
            call = call_of_object(value)
        end = skip_space(text, end)
        if call is None or not text.startswith(self.close_tag, end):
            return None, position
        return [call], end + len(self.close_tag)


def call_of_object(value: Any) -> ToolCall | None:
    """Return the call of an object with ``name`` and ``arguments`` (or ``parameters``); None if it is malformed.

    An object with a name alone is a call without arguments. One with other fields has them under an unknown name.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = call_arguments(value)
    call_id = value.get("id")
    if not isinstance(arguments, dict):
        return None
    return make_tool_call(call_id if isinstance(call_id, str) else "", value["name"], arguments)


class SectionFormat(TaggedFormat):
    """Calls in a section between two tags, each with a header before its JSON object and a tag behind it."""

    section_end: str
    header: re.Pattern[str]
    """Matches up to the JSON object, with the group ``name`` and, where the model writes one, ``id``."""
    footer: re.Pattern[str]

    def _read_block(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        calls: list[ToolCall] = []
        end = position
        while header := self.header.match(text, end):
            arguments, end = read_arguments(text, header.end())
            footer = self.footer.match(text, end)
            if arguments is None or footer is None:
                return None, position
            groups = header.groupdict()
            name = next(value for key, value in groups.items() if key.startswith("name") and value)
            calls.append(make_tool_call(groups.get("id") or "", name.strip(), arguments))
            end = footer.end()
        end = skip_space(text, end)
        if not calls or not text.startswith(self.section_end, end):
            return None, position
        return calls, end + len(self.section_end)


class DeepSeekFormat(SectionFormat):
    """DeepSeek V3 and R1 (a code block of JSON behind ``function``), and V3.1 (JSON behind the name)."""

    name = "deepseek"
    open_tag = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    header = re.compile(
        r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json|(?P<name_only>[^\s<]+)<｜tool▁sep｜>)"
    )
    footer = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>")
    text_tokens = frozenset(
        {
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<think>",
            "</think>",
        }
    )
    needs_text_arguments = True


class KimiFormat(SectionFormat):
    """Kimi K2: ``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``.

    What stands before the arguments is the id of the call, which the template repeats before its result.
    """

    name = "kimi"
    open_tag = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    header = re.compile(
        r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>"
    )
    footer = re.compile(r"\s*<\|tool_call_end\|>")
    text_tokens = frozenset(
        {
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<think>",
            "</think>",
        }
    )


class MistralFormat(TaggedFormat):
    """Mistral: ``[TOOL_CALLS]`` before a list of objects, or before each name, ``[ARGS]`` and object."""

    name = "mistral"
    thought_tags = ("[THINK]", "[/THINK]")
    open_tag = "[TOOL_CALLS]"
    text_tokens = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"})
    _header = re.compile(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\s\[]+))?\s*(?:\[ARGS\])?(?=\s*\{)")
    _list = re.compile(r"\s*\[")

    def _read_block(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        if header := self._header.match(text, position):
            arguments, end = read_arguments(text, header.end())
            if arguments is None:
                return None, position
            return [make_tool_call(header["id"] or "", header["name"], arguments)], end
        try:
            values, end = parse_json_prefix(text, skip_space(text, position))
        except ValueError:
            return None, position
        calls = [call_of_object(value) for value in (values if isinstance(values, list) else [values])]
        made = [call for call in calls if call is not None]
        return (made, end) if made and len(made) == len(calls) else (None, position)


class LlamaFormat(TaggedFormat):
    """Llama 3: a response that is one or more objects with name and parameters, separated by semicolons.

    No tag marks a call, so an object counts as one only if a tool has its name.
    """

    name = "llama"
    text_tokens = frozenset({"<|python_tag|>"})
    stop_tokens: tuple[str, ...] = ("<|eom_id|>",)
    turn_ends: tuple[str, ...] = ("<|eot_id|>", "<|eom_id|>")
    _tag = "<|python_tag|>"

    def parse(self, text: str, tools: Tools, *, starts_in_thought: bool = False) -> ParsedResponse:
        """See ``ResponseFormat``."""
        closing = self.thought_tags[1]
        ends = [self._end_of_leading_thoughts(text, is_open=starts_in_thought)]
        if closing in text:
            ends += [text.index(closing) + len(closing), text.rindex(closing) + len(closing)]
        calls: list[ToolCall] | None = []
        # JSON first: its strings may contain any tag. Then behind a thought that the text does not open.
        for end in ends:
            start = skip_space(text, end)
            tag = -1 if text.startswith("{", start) else text.find(self._tag, start)
            start = start if tag < 0 else tag + len(self._tag)
            calls = self._read_calls(text[start:], tools) if tools else []
            if calls:
                before = text[: end if tag < 0 else tag]
                reasoning, content = self.split_thoughts(before, starts_in_thought=starts_in_thought)
                return ParsedResponse(
                    text=before.strip(), content=content.strip(), reasoning=reasoning, tool_calls=tuple(calls)
                )
        reasoning, content = self.split_thoughts(text, starts_in_thought=starts_in_thought)
        # The tag alone shows that a call was meant. A bare object may be an answer.
        is_malformed = bool(tools and self._tag in content) or calls is None
        return ParsedResponse(text=text, content=content, reasoning=reasoning, num_malformed=int(is_malformed))

    def _end_of_leading_thoughts(self, text: str, *, is_open: bool) -> int:
        """Return the position behind the thoughts with which a text begins."""
        opening = self.thought_tags[0]
        end = self._end_of_thought(text, 0) if is_open else 0
        while text.startswith(opening, skip_space(text, end)):
            end = self._end_of_thought(text, end)
        return end

    def _read_calls(self, text: str, tools: Tools) -> list[ToolCall] | None:
        """Return the calls of a text; empty if it holds none, None if one is malformed."""
        calls: list[ToolCall] = []
        position = skip_space(text, 0)
        while text.startswith("{", position):
            value, end = read_arguments(text, position)
            name = value.get("name") if value is not None else None
            arguments = value.get("parameters", value.get("arguments")) if value is not None else None
            if not isinstance(name, str) or not has_tool(tools, name):
                return None if calls else []
            if not isinstance(arguments, dict):
                return None
            calls.append(make_tool_call("", name, arguments))
            position = skip_space(text, end)
            if text.startswith(";", position):
                position = skip_space(text, position + 1)
        return calls if position == len(text) else None if calls else []
