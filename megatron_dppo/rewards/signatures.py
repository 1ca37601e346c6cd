"""Calling conventions of slime, verl, TRL and this package, recognized by parameter names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.item import RewardItem, SlimeArgs, SlimeSample

Arguments = tuple[tuple[object, ...], Mapping[str, object]]


@dataclass(frozen=True)
class RunInfo:
    """Values of the run that a convention passes in addition to the sample."""

    label_key: str = "label"
    """Column of the reference answer; TRL's functions receive it under this name."""
    slime_args: Mapping[str, object] = field(default_factory=dict)
    """Values of ``args`` by the names of slime."""
    started_at: datetime = field(default_factory=datetime.now)
    """First start of the run: the date that chat templates see."""


def _ours(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
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


def _slime(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    return (SlimeArgs(run_info.slime_args), _slime_sample(items[0])), {}


def _slime_batch(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    return (SlimeArgs(run_info.slime_args), [_slime_sample(item) for item in items]), {}


def _verl_one(item: RewardItem) -> dict[str, object]:
    inner = item.metadata.get("extra_info")
    extra = dict(inner if isinstance(inner, Mapping) else item.metadata)
    return {
        "data_source": item.metadata.get("data_source", item.source),
        "solution_str": item.completion,
        "ground_truth": item.label,
        "extra_info": {"finish_reason": item.metadata.get("finish_reason"), **extra},
    }


def _verl(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    return (), _verl_one(items[0])


def _verl_batch(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    rows = [_verl_one(item) for item in items]
    return (), {f"{name}s": [row[name] for row in rows] for name in _VERL}


def _trl(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    """Return columns as lists, with messages instead of text exactly for chat rows, as TRL does."""
    columns: dict[str, list[object]] = {
        name: [item.metadata.get(name) for item in items] for name in {k: 0 for item in items for k in item.metadata}
    }
    labels = [item.label for item in items]
    standard_columns = {
        "prompts": [item.prompt if item.messages is None else [dict(m) for m in item.messages] for item in items],
        "completions": [
            item.completion if item.messages is None else [{"role": "assistant", "content": item.completion}]
            for item in items
        ],
        "completion_ids": [list(item.token_ids) for item in items],
    }
    return (), columns | {"label": labels, run_info.label_key: labels} | standard_columns


@dataclass(frozen=True)
class CallConvention:
    """A convention for calling a reward function."""

    signature: str
    """Value of ``reward.signature`` that selects it."""
    template: str
    marker_names: frozenset[str]
    """Parameter names that identify it."""
    arguments: Callable[[Sequence[RewardItem], RunInfo], Arguments]
    """Function that returns the positional and keyword arguments."""
    keywords: frozenset[str] | None
    """Names of the keyword arguments. None passes positional arguments."""
    is_batched: bool = False
    passes_columns: bool = False
    """True if any other parameter name is a column of the data."""


def _item(items: Sequence[RewardItem], run_info: RunInfo) -> Arguments:
    return (items[0],), {}


ITEM_CONVENTION = CallConvention("megatron_dppo", "f(item)", frozenset(), _item, None)
"""Convention of built-in functions that need the complete sample."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = frozenset({"prompts", "completions", "completion_ids"})
CONVENTIONS = (
    CallConvention(
        "megatron_dppo",
        "f(*, prompt, completion, label, metadata)",
        frozenset({"prompt", "completion"}),
        _ours,
        frozenset({"prompt", "completion", "label", "metadata"}),
    ),
    CallConvention("slime", "f(args, sample, **kwargs)", frozenset({"sample"}), _slime, None),
    CallConvention("slime", "f(args, samples, **kwargs)", frozenset({"samples"}), _slime_batch, None, is_batched=True),
    CallConvention(
        "verl",
        "f(data_source, solution_str, ground_truth, extra_info=None)",
        frozenset({"solution_str"}),
        _verl,
        frozenset(_VERL),
    ),
    CallConvention(
        "verl",
        "f(data_sources, solution_strs, ground_truths, extra_infos)",
        frozenset({"solution_strs"}),
        _verl_batch,
        frozenset(f"{name}s" for name in _VERL),
        is_batched=True,
    ),
    CallConvention("trl", "f(prompts, completions, **columns)", _TRL, _trl, _TRL, is_batched=True, passes_columns=True),
)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _names(parameters: Sequence[inspect.Parameter]) -> set[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in parameters if p.kind not in variable}


def recognize_signature(
    name: str,
    function: Callable[..., object],
    signature: str = "auto",
    options: Mapping[str, object] | None = None,
    table: str = "reward",
) -> CallConvention:
    """Return the convention of a function by ``reward.signature``, or for ``auto`` by its parameters' names."""
    setting = f"{table}.function = {name!r}"
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{setting}: its parameters cannot be inspected ({error}); wrap it in a Python function"
        ) from error
    # Parameter names identify the framework: no two conventions share a marker.
    names = _names(parameters)
    candidates = [convention for convention in CONVENTIONS if signature in ("auto", convention.signature)]
    matching = [convention for convention in candidates if convention.marker_names & names]
    # The user named the convention: use its first form, even if the names are unusual.
    if not matching and signature != "auto":
        matching = candidates[:1]
    if len(matching) > 1:
        readings = " or ".join(
            f"{f.signature} {f.template} (for {', '.join(sorted(f.marker_names & names))})" for f in matching
        )
        raise RewardError(
            f"{setting} with the parameters {sorted(names)} is ambiguous: it matches "
            f"{readings}. Set {table}.signature, or rename its parameters"
        )
    if not matching:
        known = "; ".join(f"{convention.signature}: {convention.template}" for convention in CONVENTIONS)
        raise RewardError(
            f"{setting} with the parameters {sorted(names)} matches none of the known signatures "
            f"({known}). Rename its parameters, or set {table}.signature"
        )
    _check_call(matching[0], setting, table, function, parameters, options or {})
    return matching[0]


def _check_call(
    convention: CallConvention,
    setting: str,
    table: str,
    function: Callable[..., object],
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, object],
) -> None:
    """Check that the function accepts the options, and that convention and options are all that it needs."""
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if convention.keywords is None:
        # The first two parameters get the sample, by position.
        by_name -= {p.name for p in parameters[:2]}
    by_name -= convention.keywords or frozenset()
    has_keyword_arguments = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    for option in options:
        if option in (convention.keywords or ()):
            raise RewardError(
                f"{table}.options has {option!r}, which {setting} receives from the sample; rename the option"
            )
        if option not in by_name and not has_keyword_arguments:
            raise RewardError(
                f"{table}.options has {option!r}, which {setting} does not accept; it accepts: "
                f"{', '.join(sorted(by_name)) or 'none'}"
            )
    # Positional conventions: let Python itself check the call.
    if convention.keywords is None:
        try:
            inspect.signature(function).bind(None, None, **options)
        except TypeError as error:
            raise RewardError(
                f"{setting} cannot be called as {convention.signature}'s {convention.template}: {error}. Give that "
                f"parameter a default, or a value in {table}.options"
            ) from error
        return
    only_positional = [p.name for p in parameters if p.kind == inspect.Parameter.POSITIONAL_ONLY]
    needed = {p.name for p in parameters if p.default is inspect.Parameter.empty} & _names(parameters)
    unknown = sorted(needed - convention.keywords - set(options)) if not convention.passes_columns else []
    if only_positional or unknown:
        raise RewardError(
            f"{setting} is called as {convention.signature}'s {convention.template}, with keyword arguments, which do "
            f"not provide {', '.join(only_positional or unknown)}. Give that parameter a default, or a value in "
            f"{table}.options, or set {table}.signature if this is another convention"
        )


def call(
    convention: CallConvention,
    function: Callable[..., object],
    items: Sequence[RewardItem],
    run_info: RunInfo,
    options: Mapping[str, object] | None = None,
) -> Any:
    """Call the function with one item, or with several if it is batched; the result of an async one is awaitable."""
    positional, named = convention.arguments(items, run_info)
    parameters = _parameters(function)
    if not any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = _names(parameters)
        named = {key: value for key, value in named.items() if key in names}
    if duplicates := sorted(named.keys() & (options or {}).keys()):
        raise ValueError(f"the option {duplicates[0]!r} is also a column of the data; rename one of them")
    return function(*positional, **named, **(options or {}))


def is_async(function: Callable[..., object]) -> bool:
    """Return True if a call gives a coroutine, for functions and for objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
