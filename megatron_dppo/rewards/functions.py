"""Loading of the function that ``reward.function`` names, ready to be called in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
from megatron_dppo.functions import content_hash, load_function
from megatron_dppo.rewards import task_rewards
from megatron_dppo.rewards.signatures import ITEM_CONVENTION, CallConvention, RunInfo, is_async, recognize_signature
from megatron_dppo.rewards.task_rewards import words_reward
from megatron_dppo_answers import math as math_reward_module

_ALSO = "".join(f"{name!r}, " for name in BUILT_IN_REWARDS)


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function by name, in the form that is sent to a worker process."""

    name: str
    """One of ``BUILT_IN_REWARDS``, ``module:function`` or ``path/to/file.py:function``."""
    signature: str = "auto"
    """``reward.signature``."""
    run_info: RunInfo = field(default_factory=RunInfo)
    """Values of the run that some signatures pass."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a built-in function, or keyword arguments of a user function."""
    table: str = "reward"
    """Table that names the function, for messages: ``reward`` or ``reward.functions.NAME``."""
    content: str = ""
    """SHA-256 of its file when the run loaded it. Empty accepts any content."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function and its calling convention."""

    function: Callable[..., object]
    convention: CallConvention
    is_async: bool
    options: Mapping[str, object] = field(default_factory=dict)


def load(spec: FunctionSpec) -> RewardFunction:
    """Import the function and recognize its signature.

    Raises:
        RewardError: The name is malformed, the import fails, it is not callable, its signature is unknown, or an option
            is unknown, missing or wrong.
    """
    if spec.name in BUILT_IN_REWARDS:
        try:
            options = read_options(spec.name, spec.options)
        except ValueError as error:
            raise RewardError(f"{spec.table}.{error}") from error
        function, convention = _built_in(spec, options)
        return RewardFunction(
            function, convention or recognize_signature(spec.name, function, "megatron_dppo"), is_async(function)
        )
    if spec.content and content_hash(spec.name) != spec.content:
        raise RewardError(
            f"{spec.table}.function = {spec.name!r}: the file was edited while the run uses it, so a new process "
            "would compute other rewards. Fix: restore the file, and rerun the same command to resume"
        )
    try:
        function = load_function(spec.name, f"{spec.table}.function", _ALSO)
    except FunctionError as error:
        raise RewardError(str(error)) from error
    convention = recognize_signature(spec.name, function, spec.signature, spec.options, spec.table)
    return RewardFunction(function, convention, is_async(function), spec.options)


def _built_in(spec: FunctionSpec, options: Section) -> tuple[Callable[..., object], CallConvention | None]:
    """Return a built-in function, and its convention unless it takes the four arguments of our own signature."""
    # Imported where they are used, because the HTTP client takes long to import in every process.
    if isinstance(options, RewardModelOptions):
        from megatron_dppo.rewards.reward_model import RewardModel

        return RewardModel(options, spec.table, spec.run_info.started_at), ITEM_CONVENTION
    if isinstance(options, JudgeOptions):
        from megatron_dppo.rewards.judge import Judge

        return Judge(options, spec.table), ITEM_CONVENTION
    if isinstance(options, CodeOptions):
        from megatron_dppo.rewards.code import Code

        return Code(options, spec.table), ITEM_CONVENTION
    if isinstance(options, ReasoningGymOptions):
        return task_rewards.make_reasoning_gym_reward(partial_credit=options.partial_credit), None
    return {"math": math_reward_module.math_reward, "words": words_reward, "none": no_reward}[spec.name], None


def no_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
    """Return 0 for every response."""
    del prompt, completion, label, metadata
    return 0.0
