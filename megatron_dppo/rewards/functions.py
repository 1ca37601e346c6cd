"""The function that ``reward.function`` names, ready to be called in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.config.reward_options import (
    BUILT_IN_REWARDS,
    CodeOptions,
    JudgeOptions,
    ReasoningGymOptions,
    RewardModelOptions,
    read_options,
)
from megatron_dppo.config.section import Section
from megatron_dppo.errors import FunctionError, RewardError
from megatron_dppo.functions import load_function
from megatron_dppo.rewards import math as math_reward_module
from megatron_dppo.rewards import task_rewards
from megatron_dppo.rewards.signatures import WHOLE_ITEM, Form, RunFacts, is_async, recognise
from megatron_dppo.rewards.task_rewards import words_reward

_ALSO = "".join(f"{name!r}, " for name in BUILT_IN_REWARDS)


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function by name, as it is sent to a worker process."""

    name: str
    """One of ``BUILT_IN_REWARDS``, ``module:function`` or ``path/to/file.py:function``."""
    signature: str = "auto"
    facts: RunFacts = field(default_factory=RunFacts)
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it gets by name beside the sample."""
    table: str = "reward"
    """Of the configuration that names it, for messages: ``reward`` or ``reward.functions.NAME``."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function and how to call it."""

    function: Callable[..., Any]
    form: Form
    is_async: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def load(spec: FunctionSpec) -> RewardFunction:
    """Import the function and recognise its signature.

    Raises:
        RewardError: the name has another form, the import fails, it is not callable, its signature is not known, or
            an option is unknown, missing or wrong.
    """
    if spec.name in BUILT_IN_REWARDS:
        try:
            options = read_options(spec.name, spec.options)
        except ValueError as error:
            raise RewardError(f"{spec.table}.{error}") from error
        function, form = _built_in(spec, options)
        return RewardFunction(function, form or recognise(spec.name, function, "megatron_dppo"), is_async(function))
    try:
        function = load_function(spec.name, f"{spec.table}.function", _ALSO)
    except FunctionError as error:
        raise RewardError(str(error)) from error
    form = recognise(spec.name, function, spec.signature, spec.options, spec.table)
    return RewardFunction(function, form, is_async(function), spec.options)


def _built_in(spec: FunctionSpec, options: Section) -> tuple[Callable[..., Any], Form | None]:
    """The function, and its form where that is not our own of four arguments."""
    # Imported where they are used: HTTP takes a while to load, in every process.
    if isinstance(options, RewardModelOptions):
        from megatron_dppo.rewards.reward_model import RewardModel

        return RewardModel(options, spec.table), WHOLE_ITEM
    if isinstance(options, JudgeOptions):
        from megatron_dppo.rewards.judge import Judge

        return Judge(options, spec.table), WHOLE_ITEM
    if isinstance(options, CodeOptions):
        from megatron_dppo.rewards.code import Code

        return Code(options, spec.table), WHOLE_ITEM
    if isinstance(options, ReasoningGymOptions):
        return task_rewards.make_reward(partial_credit=options.partial_credit), None
    return {"math": math_reward_module.math_reward, "words": words_reward, "none": no_reward}[spec.name], None


def no_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> float:
    """0 for every response."""
    del prompt, completion, label, metadata
    return 0.0
