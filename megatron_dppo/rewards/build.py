"""The scorer that a configuration describes."""

from __future__ import annotations

from megatron_dppo.config.schema import Config
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rewards.shaping import Shaping
from megatron_dppo.rewards.signatures import RunFacts


def build_scorer(config: Config) -> RewardScorer:
    """The scorer of ``[reward]``; no process starts before the first sample.

    Raises:
        RewardError: the function cannot be loaded, or its signature is not known.
    """
    reward, rollout = config.reward, config.rollout
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
