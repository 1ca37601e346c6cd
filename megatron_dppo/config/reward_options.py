"""The options of the built-in reward functions: ``[reward.options]``, or ``[reward.functions.NAME.options]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megatron_dppo.config.section import Section


class NoOptions(Section):
    """None."""


class ReasoningGymOptions(Section):
    """Of ``reasoning_gym``."""

    partial_credit: bool = False
    """Keep the task's scores below 1 (instead of 0 for them)."""


BUILT_IN: dict[str, type[Section]] = {
    "math": NoOptions,
    "reasoning_gym": ReasoningGymOptions,
    "words": NoOptions,
}
"""The built-in functions and their options."""
FILE_OPTIONS = ("tokenizer", "prompt_file")
"""Those that name a file or a folder."""


def read_options(function: str, options: Mapping[str, Any]) -> Section:
    """The checked options of a built-in function.

    Raises:
        ValueError: unknown, missing or wrong ones, each named.
    """
    model = BUILT_IN[function]
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = [_explain(function, model, detail) for detail in error.errors()]
    raise ValueError("; ".join(problems))


def _explain(function: str, model: type[Section], detail: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in detail["loc"] if isinstance(part, int) or not part.endswith("]"))
    if detail["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "no options"
        return f"options.{place}: unknown; function = {function!r} takes {known}"
    if detail["type"] == "missing":
        return f"options.{place} is missing; function = {function!r} needs it"
    message = detail["msg"].removeprefix("Value error, ")
    return f"options.{place} = {detail['input']!r}: {message}" if place else message


def needs_label(function: str, options: Mapping[str, Any]) -> bool:
    """Whether a function is a built-in one that cannot score a sample without a label."""
    return function in ("math", "reasoning_gym", "words")
