"""Formats that write each parameter between tags: Qwen3.5, GLM, MiniMax and DeepSeek V3.2.

Values have no quotes, so their types are those of the tool's JSON schema.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_dppo_conversations.formats.base import TaggedFormat, ToolCall, make_tool_call, skip_space, typed_value
from megatron_dppo_conversations.formats.json_values import parse_json
from megatron_dppo_conversations.formats.schemas import Tools, parameters_schema


@dataclass(frozen=True)
class ParameterGrammar:
    """Tags of one call. Each pattern is matched at a position, white space before it included."""

    call: re.Pattern[str]
    """Start of a call, with the group ``name``."""
    parameter: re.Pattern[str]
    """Start of a parameter up to its value, with the group ``key`` and, where the model says it, ``is_string``."""
    value_end: re.Pattern[str]
    """End of a value. What follows is checked, so that a value may contain the tag."""
    call_end: re.Pattern[str]
    has_line_breaks: bool = False
    """True if the template writes a line break before and behind each value, which are no part of it."""


def read_parameters(text: str, position: int, grammar: ParameterGrammar, tools: Tools) -> tuple[ToolCall | None, int]:
    """Return the call that begins at a position, and the position after it; None if it is malformed."""
    head = grammar.call.match(text, position)
    if head is None:
        return None, position
    schema = parameters_schema(tools, head["name"])
    schemas = schema.property_schemas()
    other_schema = schema.other_properties()
    arguments: dict[str, Any] = {}
    end = head.end()
    while parameter := grammar.parameter.match(text, end):
        closing = grammar.value_end.search(text, parameter.end())
        if closing is None:
            return None, position
        value = text[parameter.end() : closing.start()]
        if parameter["key"] in arguments:
            # Twice, or the text of the first one has the tags of its end.
            return None, position
        if grammar.has_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        inside = {start["key"] for start in grammar.parameter.finditer(value)} - {parameter["key"], *arguments}
        if inside & schemas.keys() if schemas else inside:
            # The end of the value is broken, and this is that of a later parameter.
            return None, position
        is_string = parameter.groupdict().get("is_string")
        if is_string is None:
            arguments[parameter["key"]] = typed_value(value, schemas.get(parameter["key"], other_schema))
        else:
            arguments[parameter["key"]] = value
            with suppress(ValueError):
                arguments[parameter["key"]] = value if is_string == "true" else parse_json(value)
        end = closing.end()
    tail = grammar.call_end.match(text, end)
    if tail is None:
        return None, position
    return make_tool_call("", head["name"], arguments), tail.end()


FUNCTION_GRAMMAR = ParameterGrammar(
    call=re.compile(r"\s*<function=(?P<name>[^>\s]+)>"),
    parameter=re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>"),
    value_end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    call_end=re.compile(r"\s*</function>"),
    has_line_breaks=True,
)


def read_function(text: str, position: int, tools: Tools) -> tuple[ToolCall | None, int]:
    """Return a call of Qwen3.5's form, ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""
    return read_parameters(text, position, FUNCTION_GRAMMAR, tools)


class ParameterFormat(TaggedFormat):
    """Calls in a block between two tags, with each parameter between tags."""

    grammar: ParameterGrammar
    close_tag: str
    has_many_calls: bool = True
    """True if a block may hold several calls."""

    def _read_block(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        calls: list[ToolCall] = []
        end = position
        while not calls or self.has_many_calls:
            call, next_end = read_parameters(text, end, self.grammar, tools)
            if call is None:
                break
            calls.append(call)
            end = next_end
        end = skip_space(text, end)
        if not calls or not text.startswith(self.close_tag, end):
            return None, position
        return calls, end + len(self.close_tag)

    def _unquoted_end(self) -> re.Pattern[str] | None:
        return self.grammar.value_end

    def call_end(self) -> str | None:
        """See ``ResponseFormat``."""
        return None if self.has_many_calls else self.close_tag


class QwenXmlFormat(ParameterFormat):
    """Qwen3.5 and Qwen3-Coder: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in ``<tool_call>``."""

    name = "qwen3_xml"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    grammar = FUNCTION_GRAMMAR
    has_many_calls = False
    text_tokens = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
    # Cut off within its first tag, a call is malformed and not only mentioned.
    start = re.compile(r"\s*(<function=|<[a-z]*\Z|\Z)")
    # The policy sometimes leaves the tag around a call out.
    bare_call = re.compile(r"<function=(?P<name>[^>\s]+)>")

    def _read_bare_call(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        call, end = read_function(text, position, tools)
        if call is None:
            return None, position + 1
        closing = skip_space(text, end)
        return [call], closing + len(self.close_tag) if text.startswith(self.close_tag, closing) else end


class GlmFormat(ParameterFormat):
    """GLM 4.5 to 5: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    name = "glm"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    grammar = ParameterGrammar(
        call=re.compile(r"\s*(?P<name>[^\s<>]+)"),
        parameter=re.compile(r"\s*<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>"),
        value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
        call_end=re.compile(r"(?=\s*</tool_call>)"),
    )
    has_many_calls = False
    text_tokens = frozenset(
        {
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        }
    )
    # The template starts the next message with its role, and the model writes it to end its own.
    stop_tokens: tuple[str, ...] = ("<|user|>", "<|observation|>")
    start = re.compile(r"\s*([^\s<>]+\s*(<arg_key>|</tool_call>|<[\w/]*\Z|\Z)|\Z)")


def _invoke_grammar(prefix: str, string_flag: str) -> ParameterGrammar:
    return ParameterGrammar(
        call=re.compile(rf'\s*<{prefix}invoke name="(?P<name>[^"\n]+)">'),
        parameter=re.compile(rf'\s*<{prefix}parameter name="(?P<key>[^"\n]+)"{string_flag}>'),
        value_end=re.compile(rf"</{prefix}parameter>(?=\s*(?:<{prefix}parameter |</{prefix}invoke>))"),
        call_end=re.compile(rf"\s*</{prefix}invoke>"),
    )


class MiniMaxFormat(ParameterFormat):
    """MiniMax M2: ``<minimax:tool_call><invoke name=...><parameter name=...>VALUE</parameter></invoke>...``."""

    name = "minimax"
    open_tag = "<minimax:tool_call>"
    close_tag = "</minimax:tool_call>"
    grammar = _invoke_grammar("", "")
    text_tokens = frozenset({"<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"})


class DeepSeekXmlFormat(ParameterFormat):
    """DeepSeek V3.2: as MiniMax with tags of its own, and with the type of each value in its tag."""

    name = "deepseek_xml"
    open_tag = "<｜DSML｜function_calls>"
    close_tag = "</｜DSML｜function_calls>"
    grammar = _invoke_grammar("｜DSML｜", ' string="(?P<is_string>true|false)"')
    text_tokens = frozenset({"｜DSML｜", "<think>", "</think>"})
