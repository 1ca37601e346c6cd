"""The scorer that a configuration describes."""

from __future__ import annotations

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import BUILT_IN, FunctionSpec
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rewards.shaping import Shaping
from megatron_dppo.rewards.signatures import RunFacts


def build_scorer(config: Config) -> RewardScorer:
    """The scorer of ``[reward]``; no process starts before the first sample.

    Raises:
        RewardError: the function cannot be loaded, its signature is not known, or there are no labels for it.
    """
    reward, rollout = config.reward, config.rollout
    if config.data.label_key == "" and reward.function in BUILT_IN and rollout.generate is None:
        raise RewardError(
            f"reward.function = {reward.function!r} compares answers with labels, but data.label_key = '' says that "
            "there are none; name the column of the labels, or a reward function of your own"
        )
    facts = RunFacts(
        label_key=config.data.label_key or "label",
        slime_args={
            "rollout_max_response_len": rollout.max_new_tokens,
            "rollout_temperature": rollout.temperature,
            "n_samples_per_prompt": rollout.samples_per_prompt,
            "reward_key": None,
        },
    )
    return RewardScorer(
        FunctionSpec(reward.function, reward.signature, reward.partial_credit, facts),
        reward.timeout_seconds,
        reward.num_workers,
        async_concurrency=reward.async_concurrency,
        shaping=Shaping(
            max_new_tokens=rollout.max_new_tokens,
            format=reward.format,
            overlong_buffer_tokens=reward.overlong_buffer_tokens,
            overlong_penalty=reward.overlong_penalty,
        ),
    )
