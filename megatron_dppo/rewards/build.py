"""The scorer that ``[reward]`` describes."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config.data import RolloutConfig
from megatron_dppo.config.reward import RewardConfig, RewardFunctionConfig
from megatron_dppo.config.reward_options import BUILT_IN, CodeOptions, needs_label, read_options
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.pool import FunctionPool
from megatron_dppo.rewards.scorer import Member, RewardScorer
from megatron_dppo.rewards.shaping import Shaping
from megatron_dppo.rewards.signatures import RunFacts


def build_scorer(
    reward: RewardConfig, rollout: RolloutConfig, *, label_key: str | None, is_only_source: bool
) -> RewardScorer:
    """Build the scorer of ``[reward]``; no process starts before the first sample.

    Args:
        reward: functions, options and shaping.
        rollout: lengths and numbers that functions are told.
        label_key: ``data.label_key``.
        is_only_source: only the functions give rewards, no agent and no ``rollout.generate``.

    Raises:
        RewardError: a function cannot be loaded, its signature is not known, its options do not fit, or there are no
            labels for it.
    """
    shaping = Shaping(
        max_new_tokens=rollout.max_new_tokens,
        format=reward.format,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
    )
    facts = _facts(rollout, label_key)
    has_labels = label_key != "" or not is_only_source
    if reward.functions:
        members = [
            Member(
                name,
                _pool(reward, facts, f"reward.functions.{name}", each, has_labels=has_labels),
                each.weight,
                each.eval,
            )
            for name, each in reward.functions.items()
        ]
        return RewardScorer.of_several(members, shaping)
    options = reward.options | ({"partial_credit": True} if reward.partial_credit else {})
    one = RewardFunctionConfig(function=reward.function, signature=reward.signature, options=options)
    return RewardScorer.of_several([Member("", _pool(reward, facts, "reward", one, has_labels=has_labels))], shaping)


def _pool(
    reward: RewardConfig, facts: RunFacts, table: str, one: RewardFunctionConfig, *, has_labels: bool
) -> FunctionPool:
    name = one.function
    if not has_labels and needs_label(name, one.options):
        raise RewardError(
            f"{table}.function = {name!r} compares answers with labels, but data.label_key = '' says that "
            "there are none; name the column of the labels, or a reward function of your own"
        )
    timeout = one.timeout_seconds or reward.timeout_seconds
    options = read_options(name, one.options) if name in BUILT_IN else None
    if isinstance(options, CodeOptions) and options.total_seconds + 2 > timeout:
        raise RewardError(
            f"{table}: options.total_seconds = {options.total_seconds:g} must stay 2 s below timeout_seconds = "
            f"{timeout:g}, or a slow program would count as failed (no gradient) instead of as wrong"
        )
    return FunctionPool(
        FunctionSpec(name, one.signature, facts, one.options, table),
        timeout,
        one.num_workers or reward.num_workers,
        async_concurrency=one.async_concurrency or reward.async_concurrency,
    )


def _facts(rollout: RolloutConfig, label_key: str | None) -> RunFacts:
    slime_args: dict[str, Any] = {
        "rollout_max_response_len": rollout.max_new_tokens,
        "rollout_temperature": rollout.temperature,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "reward_key": None,
    }
    return RunFacts(label_key=label_key or "label", slime_args=slime_args)
