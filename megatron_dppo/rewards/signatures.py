"""Reward functions as slime, verl and TRL write them, and our own form: told apart by their parameters' names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.item import RewardItem, SlimeArgs, SlimeSample

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RunFacts:
    """What an adapter knows of the run beyond the sample."""

    label_key: str = "label"
    """Column of the reference answer: TRL's functions get it under this name."""
    slime_args: Mapping[str, Any] = field(default_factory=dict)
    """slime's ``args``, by slime's names."""


def _ours(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    item = items[0]
    return (), {"prompt": item.prompt, "completion": item.completion, "label": item.label, "metadata": item.metadata}


def _slime_sample(item: RewardItem) -> SlimeSample:
    inner = item.metadata.get("metadata")
    return SlimeSample(
        prompt=item.prompt,
        response=item.completion,
        label=item.label,
        metadata=dict(inner if isinstance(inner, Mapping) else item.metadata),
        response_length=len(item.token_ids),
        status=SlimeSample.Status.TRUNCATED if item.truncated else SlimeSample.Status.COMPLETED,
    )


def _slime(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    return (SlimeArgs(facts.slime_args), _slime_sample(items[0])), {}


def _slime_batch(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    return (SlimeArgs(facts.slime_args), [_slime_sample(item) for item in items]), {}


def _verl_one(item: RewardItem) -> dict[str, Any]:
    inner = item.metadata.get("extra_info")
    extra = dict(inner if isinstance(inner, Mapping) else item.metadata)
    return {
        "data_source": item.metadata.get("data_source", ""),
        "solution_str": item.completion,
        "ground_truth": item.label,
        "extra_info": {"finish_reason": item.metadata.get("finish_reason"), **extra},
    }


def _verl(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    return (), _verl_one(items[0])


def _verl_batch(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    rows = [_verl_one(item) for item in items]
    plural = {
        "data_source": "data_sources",
        "solution_str": "solution_strs",
        "ground_truth": "ground_truths",
        "extra_info": "extra_infos",
    }
    return (), {many: [row[one] for row in rows] for one, many in plural.items()}


def _trl(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    """Columns as lists; messages instead of text exactly for the rows that are chats, as TRL does."""
    columns: dict[str, list[Any]] = {
        name: [item.metadata.get(name) for item in items] for name in {k: 0 for item in items for k in item.metadata}
    }
    labels = [item.label for item in items]
    own = {
        "prompts": [item.prompt if item.messages is None else [dict(m) for m in item.messages] for item in items],
        "completions": [
            item.completion if item.messages is None else [{"role": "assistant", "content": item.completion}]
            for item in items
        ],
        "completion_ids": [list(item.token_ids) for item in items],
    }
    return (), columns | {"label": labels, facts.label_key: labels} | own


@dataclass(frozen=True)
class Form:
    """One way of calling a reward function."""

    signature: str
    shape: str
    """How it looks in messages."""
    marks: frozenset[str]
    """Parameter names that tell this form from the others."""
    arguments: Callable[[Sequence[RewardItem], RunFacts], Arguments]
    offered: frozenset[str] | None
    """Names that are passed; None = positional."""
    batched: bool = False
    columns: bool = False
    """Whether any other name is a column of the data."""


def _item(items: Sequence[RewardItem], facts: RunFacts) -> Arguments:
    return (items[0],), {}


WHOLE_ITEM = Form("megatron_dppo", "f(item)", frozenset(), _item, None)
"""That of built-in functions which need all of a sample."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = frozenset({"prompts", "completions", "completion_ids"})
FORMS = (
    Form(
        "megatron_dppo",
        "f(*, prompt, completion, label, metadata)",
        frozenset({"prompt", "completion"}),
        _ours,
        frozenset({"prompt", "completion", "label", "metadata"}),
    ),
    Form("slime", "f(args, sample, **kwargs)", frozenset({"sample"}), _slime, None),
    Form("slime", "f(args, samples, **kwargs)", frozenset({"samples"}), _slime_batch, None, batched=True),
    Form(
        "verl",
        "f(data_source, solution_str, ground_truth, extra_info=None)",
        frozenset({"solution_str"}),
        _verl,
        frozenset(_VERL),
    ),
    Form(
        "verl",
        "f(data_sources, solution_strs, ground_truths, extra_infos)",
        frozenset({"solution_strs"}),
        _verl_batch,
        frozenset(f"{name}s" for name in _VERL),
        batched=True,
    ),
    Form("trl", "f(prompts, completions, **columns)", _TRL, _trl, _TRL, batched=True, columns=True),
)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _names(parameters: Sequence[inspect.Parameter]) -> set[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in parameters if p.kind not in variable}


def recognise(
    name: str,
    function: Callable[..., Any],
    signature: str = "auto",
    options: Mapping[str, Any] | None = None,
    table: str = "reward",
) -> Form:
    """The form of a function, by ``reward.signature`` or, for ``auto``, by its parameters' names.

    Args:
        name: of the function, for messages.
        function: the function.
        signature: of its form.
        options: what it gets by name beside its form's arguments.
        table: of the configuration that names it.

    Raises:
        RewardError: no form fits, several do, or the function needs an argument that neither its form nor the options
            have, or does not take one of the options.
    """
    setting = f"{table}.function = {name!r}"
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{setting}: its parameters cannot be read ({error}); wrap it") from error
    names = _names(parameters)
    candidates = [form for form in FORMS if signature in ("auto", form.signature)]
    fitting = [form for form in candidates if form.marks & names]
    if not fitting and signature != "auto":
        fitting = candidates[:1]
    if len(fitting) > 1:
        readings = " or ".join(f"{f.signature} {f.shape} (for {', '.join(sorted(f.marks & names))})" for f in fitting)
        raise RewardError(
            f"{setting} with the parameters {sorted(names)} is ambiguous: it can be read as "
            f"{readings}. Set {table}.signature, or rename its parameters"
        )
    if not fitting:
        known = "; ".join(f"{form.signature}: {form.shape}" for form in FORMS)
        raise RewardError(
            f"{setting} with the parameters {sorted(names)} has none of the known signatures "
            f"({known}). Rename its parameters, or set {table}.signature"
        )
    _check_options(fitting[0], setting, table, parameters, options or {})
    _check_callable_as(fitting[0], setting, table, function, parameters, options or {})
    return fitting[0]


def _check_options(
    form: Form, setting: str, table: str, parameters: Sequence[inspect.Parameter], options: Mapping[str, Any]
) -> None:
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if form.offered is None:
        by_name -= {p.name for p in parameters[:2]}
    by_name -= form.offered or frozenset()
    takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    for option in options:
        if option in (form.offered or ()):
            raise RewardError(
                f"{table}.options has {option!r}, which {setting} gets from the sample; give the option another name"
            )
        if option not in by_name and not takes_any:
            raise RewardError(
                f"{table}.options has {option!r}, which {setting} does not take; the options that it takes: "
                f"{', '.join(sorted(by_name)) or 'none'}"
            )


def _check_callable_as(
    form: Form,
    setting: str,
    table: str,
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, Any],
) -> None:
    if form.offered is None:
        try:
            inspect.signature(function).bind(None, None, **options)
        except TypeError as error:
            raise RewardError(
                f"{setting} cannot be called as {form.signature}'s {form.shape}: {error}. Give that parameter a "
                f"default, or a value in {table}.options"
            ) from error
        return
    only_positional = [p.name for p in parameters if p.kind == inspect.Parameter.POSITIONAL_ONLY]
    needed = {p.name for p in parameters if p.default is inspect.Parameter.empty} & _names(parameters)
    unknown = sorted(needed - form.offered - set(options)) if not form.columns else []
    if only_positional or unknown:
        raise RewardError(
            f"{setting} is called as {form.signature}'s {form.shape}, by name, which cannot fill "
            f"{', '.join(only_positional or unknown)}. Give that parameter a default, or a value in {table}.options, "
            f"or set {table}.signature if this is another form"
        )


def call(
    form: Form,
    function: Callable[..., Any],
    items: Sequence[RewardItem],
    facts: RunFacts,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """What the function returns, which is awaitable for an async one; a form that is not batched gets one item.

    Raises:
        ValueError: an option has the name of a column of the data that the function takes, too.
    """
    positional, named = form.arguments(items, facts)
    parameters = _parameters(function)
    if not any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = _names(parameters)
        named = {key: value for key, value in named.items() if key in names}
    if both := sorted(named.keys() & (options or {}).keys()):
        raise ValueError(f"the option {both[0]!r} is a column of the data as well; rename one of them")
    return function(*positional, **named, **(options or {}))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine, for functions and for objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
