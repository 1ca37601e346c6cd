"""Chat templates whose date is fixed: the same messages have the same text on every day of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol, overload
from weakref import WeakKeyDictionary

from megatron_dppo_conversations.formats import choose_format
from megatron_dppo_conversations.rules import fold_notes, with_descriptions, with_text_arguments, with_thinking

_CODES = "aAwdbBmyYHIpMSfjUWcxXGuVDFTRenthCg"
"""Format codes of ``strftime`` that have a value without a time zone."""
_MACRO = (
    "{%- macro strftime_now(format) -%}"
    "{%- set clock = namespace(text=format) -%}"
    "{%- for code, value in strftime_values.items() -%}"
    "{%- set clock.text = clock.text | replace(code, value) -%}"
    "{%- endfor -%}{{ clock.text }}{%- endmacro %}\n"
)
"""Replacement of the function of transformers, which reads the clock.

A template takes no functions as variables. The line break after the last tag is removed by ``trim_blocks``, so that the
template itself still begins at the start of a line.
"""


class ChatTokenizer(Protocol):
    """A ``PreTrainedTokenizerBase`` with a chat template."""

    chat_template: str | None
    """The template. Several, by name, are no str."""

    def get_chat_template(self, chat_template: str | None, tools: Sequence[Mapping[str, object]] | None) -> str:
        """Return the template for a conversation with these tools."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None, **options: Any
    ) -> Any:
        """Return the text of a conversation, or its token ids."""


_prints_tools: WeakKeyDictionary[ChatTokenizer, dict[str, bool]] = WeakKeyDictionary()
"""Results of ``prints_tools`` by tokenizer, template and variables."""


@overload
def apply_chat_template(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, object]],
    now: datetime,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = False,
    tokenize: Literal[False] = False,
    variables: Mapping[str, object] | None = None,
) -> str: ...


@overload
def apply_chat_template(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, object]], now: datetime, *, tokenize: Literal[True]
) -> list[int]: ...


def apply_chat_template(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, object]],
    now: datetime,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = False,
    tokenize: bool = False,
    variables: Mapping[str, object] | None = None,
) -> str | list[int]:
    """Return the text of messages (at least one), or with ``tokenize`` their token ids [P].

    System messages that the template refuses or leaves out are joined at the start, or folded into the user's message
    before them. Arguments of tool calls are text where the model's format needs that. The template sees ``now`` as the
    date (``strftime_now``). It is a program of the model's authors and may raise anything.
    """
    arguments: dict[str, Any] = dict(variables or {})
    template = tokenizer.chat_template
    if not isinstance(template, str):  # several, by name
        template = tokenizer.get_chat_template(None, tools)
    if "strftime_now" in template:
        arguments["chat_template"] = _MACRO + template
        arguments["strftime_values"] = _values(now)
    if tokenize:
        arguments["return_dict"] = False
    if choose_format(template).needs_text_arguments:
        messages = with_text_arguments(messages)
    if "message.thinking" in template and "reasoning_content" not in template:
        messages = with_thinking(messages)
        tools = with_descriptions(tools or ()) or None

    def render(each: Sequence[Mapping[str, Any]]) -> Any:
        return tokenizer.apply_chat_template(
            [dict(message) for message in each],
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            **arguments,
        )

    folded = fold_notes(messages)
    if folded == [dict(message) for message in messages]:
        return render(messages)
    try:
        text = render(messages)
    except Exception as error:
        try:
            return render(folded)
        except Exception:
            # The first error is about the messages as they were written.
            raise error from None
    notes = Counter(str(message["content"]).strip() for message in messages if message["role"] == "system")
    is_complete = tokenize or all(text.count(note) >= number for note, number in notes.items())
    return text if is_complete else render(folded)


def prints_tools(tokenizer: ChatTokenizer, now: datetime, variables: Mapping[str, object] | None = None) -> bool:
    """Return True if the chat template writes tools into the prompt; some silently leave them out."""
    known = _prints_tools.setdefault(tokenizer, {})
    key = repr((tokenizer.chat_template, variables))
    if key not in known:
        known[key] = _render_marked_tool(tokenizer, now, variables)
    return known[key]


def _render_marked_tool(tokenizer: ChatTokenizer, now: datetime, variables: Mapping[str, Any] | None) -> bool:
    name = "marked_tool_7c1f"
    function = {"name": name, "description": "x", "parameters": {"type": "object", "properties": {}}}
    messages = [{"role": "user", "content": "x"}]
    try:
        text = apply_chat_template(
            tokenizer,
            messages,
            now,
            tools=[{"type": "function", "function": function}],
            add_generation_prompt=True,
            variables=variables,
        )
    except Exception:  # what it says of real messages is told then
        return True
    return name in text


def template_problem(error: Exception) -> str:
    """Return what an exception of ``apply_chat_template`` says, and the fix.

    A template refuses messages by an exception of its own. Any other one is a mistake of the template, or a value that
    it does not expect.
    """
    kind = type(error).__name__
    if kind == "TemplateSyntaxError":
        line = getattr(error, "lineno", "?")
        return (
            f"the chat template has a syntax error in line {line}: {error}. Fix chat_template.jinja (or the field "
            "chat_template of tokenizer_config.json), or copy the published one into the model folder"
        )
    if kind == "TemplateError":
        return (
            f"the chat template refuses the messages: {error}. Change their roles or order, or use a model folder with "
            "another template"
        )
    return (
        f"the chat template fails on the messages: {kind}: {error}. Compare their fields with those that the template "
        "reads, or use a model folder with another template"
    )


def _values(now: datetime) -> dict[str, str]:
    """Return the text of each format code, longer codes first."""
    codes = [f"%{flag}{code}" for flag in ("-", "_", "") for code in _CODES]
    # "%%" comes last, so that its result is not taken for the start of a code.
    return {code: now.strftime(code) for code in codes} | {"%Z": "", "%z": "", "%%": "%"}
