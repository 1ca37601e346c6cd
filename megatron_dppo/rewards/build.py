"""The scorer that a configuration describes."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config.reward import RewardFunctionConfig
from megatron_dppo.config.reward_options import BUILT_IN, CodeOptions, needs_label, read_options
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.pool import FunctionPool
from megatron_dppo.rewards.scorer import Member, RewardScorer
from megatron_dppo.rewards.shaping import Shaping
from megatron_dppo.rewards.signatures import RunFacts


def build_scorer(config: Config) -> RewardScorer:
    """The scorer of ``[reward]``; no process starts before the first sample.

    Raises:
        RewardError: a function cannot be loaded, its signature is not known, its options do not fit, or there are no
            labels for it.
    """
    reward, rollout = config.reward, config.rollout
    shaping = Shaping(
        max_new_tokens=rollout.max_new_tokens,
        format=reward.format,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
    )
    if reward.functions:
        members = [
            Member(name, _pool(config, f"reward.functions.{name}", each), each.weight, each.eval)
            for name, each in reward.functions.items()
        ]
        return RewardScorer.of_several(members, shaping)
    options = reward.options | ({"partial_credit": True} if reward.partial_credit else {})
    one = RewardFunctionConfig(function=reward.function, signature=reward.signature, options=options)
    return RewardScorer.of_several([Member("", _pool(config, "reward", one))], shaping)


def _asks(config: Config) -> bool:
    """Whether nothing else than the reward function gives rewards."""
    return config.rollout.generate is None and not config.agent.is_set


def _pool(config: Config, table: str, one: RewardFunctionConfig) -> FunctionPool:
    reward, name = config.reward, one.function
    if config.data.label_key == "" and _asks(config) and needs_label(name, one.options):
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
        FunctionSpec(name, one.signature, _facts(config), one.options, table),
        timeout,
        one.num_workers or reward.num_workers,
        async_concurrency=one.async_concurrency or reward.async_concurrency,
    )


def _facts(config: Config) -> RunFacts:
    rollout = config.rollout
    slime_args: dict[str, Any] = {
        "rollout_max_response_len": rollout.max_new_tokens,
        "rollout_temperature": rollout.temperature,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "reward_key": None,
    }
    return RunFacts(label_key=config.data.label_key or "label", slime_args=slime_args)
