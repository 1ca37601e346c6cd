"""The protocol of response formats, and the reading of thoughts and tags that most of them share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from megatron_dppo_conversations.formats.json_values import parse_json
from megatron_dppo_conversations.formats.schemas import Tools, ValueSchema, has_tool

_SPACE = re.compile(r"\s*")
ARGUMENT_FIELDS = ("arguments", "parameters")
"""Names of a call's arguments, as the families write them."""
_CALL_FIELDS = (*ARGUMENT_FIELDS, "name", "id", "type", "index")
_CONSTANTS: dict[str, Any] = {"True": True, "False": False, "None": None}


class CalledFunction(TypedDict):
    """The function of a tool call."""

    name: str
    arguments: object
    """JSON object."""


class ToolCall(TypedDict):
    """A tool call as chat templates expect it."""

    type: str
    id: str
    """Empty if the policy has written none."""
    function: CalledFunction


@dataclass(frozen=True, kw_only=True)
class ParsedResponse:
    """A response, split into its parts."""

    text: str
    """Response up to its first tool call, with its thoughts as they were sampled."""
    content: str
    """The same without thoughts."""
    reasoning: str = ""
    """Thoughts without their tags."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls as chat templates expect them. Empty if one of them is malformed."""
    num_malformed: int = 0
    """Number of malformed tool calls. The text keeps them."""


class ResponseFormat(Protocol):
    """Form in which the models of a family write thoughts and tool calls."""

    name: str
    """Value of ``agent.format``."""
    text_tokens: frozenset[str]
    """Special tokens that are a part of the text of a response."""
    stop_tokens: tuple[str, ...]
    """Tokens that end a turn, besides the model's own end tokens."""
    turn_ends: tuple[str, ...]
    """Tokens that end a message and may replace each other: a template closes every turn with one of them."""
    needs_text_arguments: bool
    """True if the chat template concatenates the arguments of tool calls as text, and fails on objects."""

    def parse(self, text: str, tools: Tools, *, starts_in_thought: bool = False) -> ParsedResponse:
        """Split the text of a response.

        Args:
            text: The response, decoded with ``text_tokens``.
            tools: Tools of the request. Without tools no call is read.
            starts_in_thought: True if the prompt has opened the thought.
        """

    def answer_text(self, text: str) -> str:
        """Return the text of a response as rewards and judges read it: thoughts between tags, and then the answer."""

    def visible_text(self, text: str) -> str:
        """Return the content of an assistant message without thoughts, by which messages are compared."""

    def call_end(self) -> str | None:
        """Return the tag behind a single tool call; None if calls have no end of their own."""


def call_arguments(fields: Mapping[str, Any]) -> object:
    """Return the arguments of a call by any of their names; {} if there are none.

    None stands for fields of another name, which may be the arguments.
    """
    key = next((each for each in ARGUMENT_FIELDS if fields.get(each) is not None), None)
    if key is not None:
        return fields[key]
    is_known = all(name in _CALL_FIELDS or value is None for name, value in fields.items())
    return {} if is_known else None


def make_tool_call(call_id: str, name: str, arguments: object) -> ToolCall:
    """Return a tool call as chat templates expect it. The id is empty if the policy has written none."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is no white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def typed_value(text: str, schema: ValueSchema) -> Any:
    """Return the value of a parameter that is written without quotes.

    It is the JSON that the text holds if the schema allows that, and else the text if it allows a string. Where it
    allows a string, a JSON string is text with quotes. No schema allows any type.
    """
    value: Any = text
    try:
        value = parse_json(text.strip())
    except ValueError:
        # Models trained on Python code write its constants.
        if not schema.allows_all:
            value = _CONSTANTS.get(text.strip(), text)
    if schema.allows_all:
        return value
    # A value of ``enum`` that the schema does not list still has one of its types.
    for by_type in (False, True):
        if not isinstance(value, str) and schema.allows(value, by_type=by_type):
            return value
        if schema.allows(text, by_type=by_type):
            return text
    return value


class TaggedFormat:
    """Format with thoughts between two tags, and tool calls behind an opening tag.

    Subclasses read the calls of a block. Text is read once from its start to its end, so that a string in a call may
    contain any tag.
    """

    name = "none"
    thought_tags = ("<think>", "</think>")
    open_tag: str | None = None
    """Tag before a block of tool calls. None: the format has none."""
    start: re.Pattern[str] | None = None
    """Matches behind an opening tag that begins a call, and is not only mentioned. None: each one does."""
    bare_call: re.Pattern[str] | None = None
    """Matches a call without opening tag up to its ``name``, which counts if a tool has it. None: there is none."""
    text_tokens: frozenset[str] = frozenset()
    stop_tokens: tuple[str, ...] = ()
    turn_ends: tuple[str, ...] = ()
    needs_text_arguments = False

    def parse(self, text: str, tools: Tools, *, starts_in_thought: bool = False) -> ParsedResponse:
        """See ``ResponseFormat``."""
        calls: list[ToolCall] = []
        malformed = 0
        first = len(text)
        for start, block in self._blocks(text, tools, starts_in_thought=starts_in_thought):
            if block is None:
                malformed += 1
                continue
            first = first if calls else start
            calls += block
        has_calls = bool(calls) and not malformed
        before = text[:first].strip() if has_calls else text
        reasoning, content = self.split_thoughts(before, starts_in_thought=starts_in_thought)
        return ParsedResponse(
            text=before,
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(calls) if has_calls else (),
            num_malformed=malformed,
        )

    def split_thoughts(self, text: str, *, starts_in_thought: bool = False) -> tuple[str, str]:
        """Return the thoughts at the start of a text, and the rest; the text as it is if there are none.

        A closing tag without an opening one ends a thought that the prompt has opened. An opening tag behind visible
        text is a thought only if it is closed.
        """
        opening, closing = self.thought_tags
        thoughts: list[str] = []
        visible: list[str] = []
        remaining = text
        is_open = starts_in_thought
        while True:
            before, tag, after = remaining.partition(closing if is_open else opening)
            if is_open:
                if not tag and any(part.strip() for part in visible):
                    visible.append(opening + remaining)  # only mentioned
                    break
                thoughts.append(before.removeprefix(opening))
            else:
                if closing in before:
                    # The thought began in the prompt, or the text says that it goes on: all before it was thought.
                    thought, _, before = before.rpartition(closing)
                    thoughts += [*visible, thought]
                    visible = []
                visible.append(before)
            if not tag:
                break
            is_open = not is_open
            remaining = after
        if not thoughts:
            return "", text
        reasoning = "\n".join(part for part in (thought.replace(closing, "").strip() for thought in thoughts) if part)
        return reasoning, "".join(visible).strip()

    def answer_text(self, text: str) -> str:
        """See ``ResponseFormat``. The tags of this form are those that rewards know."""
        return text

    def visible_text(self, text: str) -> str:
        """See ``ResponseFormat``."""
        return self.split_thoughts(text)[1].strip()

    def call_end(self) -> str | None:
        """See ``ResponseFormat``."""
        return None

    def _blocks(self, text: str, tools: Tools, *, starts_in_thought: bool) -> list[tuple[int, list[ToolCall] | None]]:
        """Return position and calls of each block outside of thoughts; None for the calls of a malformed one."""
        if self.open_tag is None or not tools:
            return []
        opening, closing = self.thought_tags
        tags = "|".join(map(re.escape, (self.open_tag, opening, closing)))
        tag = re.compile(tags if self.bare_call is None else f"{tags}|{self.bare_call.pattern}")
        blocks: list[tuple[int, list[ToolCall] | None]] = []
        position = self._end_of_thought(text, 0) if starts_in_thought else 0
        counted = -1  # where the call of the last malformed block begins
        while match := tag.search(text, position):
            position = match.end()
            if match[0] == opening:
                position = self._end_of_thought(text, position)
            elif match[0] == closing:
                # The thought began in the prompt: everything before was thought.
                blocks = []
            elif not self._begins_call(text, match, tools):
                continue
            else:
                is_bare = match[0] != self.open_tag
                if is_bare:
                    calls, position = self._read_bare_call(text, match.start(), tools)
                else:
                    calls, position = self._read_block(text, position, tools)
                if calls is not None and self._is_cut(text, position, tag, tools):
                    calls = None
                if not is_bare or calls is not None or match.start() != counted:
                    blocks.append((match.start(), calls))
                if not is_bare:
                    counted = skip_space(text, match.end()) if calls is None else -1
        return blocks

    def _unquoted_end(self) -> re.Pattern[str] | None:
        """Return a pattern of the end of a value without quotes, which a string may hold; None if all have quotes."""
        return None

    def _is_cut(self, text: str, position: int, tag: re.Pattern[str], tools: Tools) -> bool:
        """Return True if the end of a value follows a call, before another one begins.

        Then a string of the call holds the tags of its end. Nothing says which of them is the end.
        """
        value_end = self._unquoted_end()
        if value_end is None:
            return False
        starts = (match.start() for match in tag.finditer(text, position) if self._begins_call(text, match, tools))
        return value_end.search(text, position, next(starts, len(text))) is not None

    def _begins_call(self, text: str, match: re.Match[str], tools: Tools) -> bool:
        """Return True if a tag begins a call, and is no tag of a thought and not only mentioned."""
        if match[0] in self.thought_tags:
            return False
        if match[0] != self.open_tag:
            return has_tool(tools, match["name"])
        return self.start is None or self.start.match(text, match.end()) is not None

    def _read_bare_call(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        """Return the call without opening tag at a position, as ``_read_block`` does; the position is later."""
        raise NotImplementedError

    def _end_of_thought(self, text: str, position: int) -> int:
        closing = self.thought_tags[1]
        end = text.find(closing, position)
        return len(text) if end < 0 else end + len(closing)

    def _read_block(self, text: str, position: int, tools: Tools) -> tuple[list[ToolCall] | None, int]:
        """Return the calls of the block at a position (None if malformed), and where reading continues."""
        raise NotImplementedError
