"""Loading of the function that ``reward.function`` names, ready to be called in a worker process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_dppo.config.reward_options import (
    BUILT_IN_REWARDS,
    CodeOptions,
    JudgeOptions,
    RewardModelOptions,
    read_options,
)
from megatron_dppo.config.section import Section
from megatron_dppo.errors import FunctionError, RewardError
from megatron_dppo.functions import content_hash, load_function
from megatron_dppo.functions.packages import load_only
from megatron_dppo.rewards.signatures import ITEM_CONVENTION, CallConvention, RunInfo, is_async, recognize_signature
from megatron_dppo_answers.math import math_reward, quick_math_reward

GROUP = "megatron_dppo.rewards"
"""Entry points by name: functions that return the ``PackagedReward`` for the options of a built-in name."""
_ALSO = "".join(f"{name!r}, " for name in BUILT_IN_REWARDS)

QuickScore = Callable[[str, str, Mapping[str, Any]], float | None]
"""Function of completion, label and metadata that needs no process; None leaves the sample to a process."""


@dataclass(frozen=True)
class PackagedReward:
    """A reward function of the signature ``megatron_dppo``, and a quick form of it if it has one."""

    function: Callable[..., float]
    quick: QuickScore | None = None


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
    quick: QuickScore | None = None


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
        return _built_in(spec, options)
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


def _built_in(spec: FunctionSpec, options: Section) -> RewardFunction:
    # Imported where they are used, because the HTTP client takes long to import in every process.
    if isinstance(options, RewardModelOptions):
        from megatron_dppo.rewards.reward_model import RewardModel

        return _item_reward(RewardModel(options, spec.table, spec.run_info.started_at))
    if isinstance(options, JudgeOptions):
        from megatron_dppo.rewards.judge import Judge

        return _item_reward(Judge(options, spec.table))
    if isinstance(options, CodeOptions):
        from megatron_dppo.rewards.code import Code

        return _item_reward(Code(options, spec.table))
    reward = _OF_TRAINER.get(spec.name)
    if reward is None:
        setting = f"{spec.table}.function = {spec.name!r}"
        reward = cast(PackagedReward, load_only(GROUP, spec.name, setting)(options))
    convention = recognize_signature(spec.name, reward.function, "megatron_dppo")
    return RewardFunction(reward.function, convention, is_async(reward.function), quick=reward.quick)


def _item_reward(function: Callable[..., Any]) -> RewardFunction:
    return RewardFunction(function, ITEM_CONVENTION, is_async(function))


def no_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, object]) -> float:
    """Return 0 for every response."""
    del prompt, completion, label, metadata
    return 0.0


_OF_TRAINER = {
    "math": PackagedReward(math_reward, quick_math_reward),
    "none": PackagedReward(no_reward),
}
