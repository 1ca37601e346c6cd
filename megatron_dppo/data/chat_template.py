"""Chat templates whose date is fixed: the same messages have the same text on every day of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

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


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    now: datetime,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    tokenize: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Any:
    """Return the text of messages, or their token ids.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: At least one message.
        now: Date and time that the template sees (``strftime_now``).
        tools: Tools of the conversation.
        add_generation_prompt: End with the beginning of an answer.
        tokenize: Return token ids. Shape [P].
        variables: Further variables of the template.

    Raises:
        Exception: A template is a program of the model's authors and may raise anything.
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
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=None if tools is None else list(tools),
        add_generation_prompt=add_generation_prompt,
        tokenize=tokenize,
        **arguments,
    )


def _values(now: datetime) -> dict[str, str]:
    """Return the text of each format code, longer codes first."""
    codes = [f"%{flag}{code}" for flag in ("-", "_", "") for code in _CODES]
    # "%%" comes last, so that its result is not taken for the start of a code.
    return {code: now.strftime(code) for code in codes} | {"%Z": "", "%z": "", "%%": "%"}
