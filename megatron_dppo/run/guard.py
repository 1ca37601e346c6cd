"""The guard of each step's first update: before it, policy and rollout engine have the same weights, so that what is
between their probabilities is rounding. More than that means wrong data, and nothing is learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.platform import coarser
from megatron_dppo.types import Metric, RolloutGroup

_LIMITS = {
    # By the coarser dtype of engine and trainer, for every engine alike: what they differ in is smaller than the
    # distance to these limits. docs/probe.md has the measurements.
    "fp32": 1e-3,
    "fp16": 0.015,
    "bf16": 0.06,
}
"""Of the mean |pi - mu| of an on-policy update."""

_DROPPED = (
    "Likely causes: overflow in the engine's half precision (try rollout.dtype = 'fp32', or bf16 instead of fp16), a "
    "sampling filter, or something between here and the server that rewrites answers"
)
_DIFFERENT = (
    "Likely causes: log-probabilities, tokens or routed experts of another position or request; log-probabilities at "
    "another temperature; other weights than were sent; a coarser type in the engine than rollout.dtype says "
    "(quantized weights or cache, TF32). Let the probe look after every sync (rollout.weight_sync.probe_every = 1) and "
    "give the URLs of the servers themselves, without a gateway. If the engine is meant to be that coarse, set "
    "train.max_first_prob_diff to what it needs"
)


@dataclass(frozen=True, kw_only=True)
class FirstUpdateGuard:
    """What the first update of a step must keep to; ``None`` = not looked at."""

    largest_difference: float | None
    """of the mean |pi - mu|"""
    largest_dropped: float | None
    """share of the sampled tokens without a finite rollout log-probability"""
    dropped: float
    """that share in this step, over all ranks"""
    engine: str
    dtype: str
    noise: float = 0.0
    """``train.layer_noise.std``, under which the policy's probabilities are"""

    @classmethod
    def of(
        cls, train: TrainConfig, rollout: RolloutConfig, model: ModelConfig, *, dropped: float, on_policy: bool
    ) -> FirstUpdateGuard:
        """The guard of one step.

        Args:
            train: the limits.
            rollout: the engine and its dtype, which default limits follow from.
            model: the trainer's dtype.
            dropped: see the field.
            on_policy: whether the current weights sampled every token of the step. Tokens of older weights differ by
                what was learned since, for which there is no limit.
        """
        dtype = coarser(rollout.rounding_dtype, model.dtype)
        wanted = train.max_first_prob_diff
        dropped_limit = train.max_dropped_fraction
        usual = None if rollout.perturbation.is_active else _LIMITS[dtype]
        if rollout.batch_invariant:
            usual = 0.0
        limit = usual if wanted == "auto" else None if wanted == "off" else wanted
        return cls(
            largest_difference=limit if on_policy else None,
            largest_dropped=None if dropped_limit == "off" else dropped_limit,
            dropped=dropped,
            engine=rollout.engine,
            dtype=dtype,
            noise=train.layer_noise.std,
        )

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Look at the reduced metrics of the first update, which are the same on every rank, before it is applied.

        Raises:
            TrainingStopped: out of bounds; the message has the numbers, the limits and the likely causes.
        """
        problems = []
        if self.largest_dropped is not None and not self.dropped <= self.largest_dropped:
            problems.append(
                f"{self.dropped:.2%} of the sampled tokens have no finite rollout log-probability and would be dropped "
                f"from the loss; train.max_dropped_fraction = {self.largest_dropped:g}. {_DROPPED}"
            )
        difference = metrics["abs_prob_diff"]
        if self.largest_difference is not None and not difference <= self.largest_difference:
            of_noise = (
                f"The policy is under train.layer_noise.std = {self.noise:g}, which alone makes a difference: lower "
                "it, or set train.max_first_prob_diff to what it makes. "
            )
            problems.append(
                f"the policy's probabilities of the sampled tokens differ from those that the engine "
                f"{self.engine!r} reported by {difference:.3g} on average, before the first update of the step, where "
                f"both have the same weights; {self.dtype} allows {self.largest_difference:g} "
                f"(train.max_first_prob_diff). {of_noise if self.noise else ''}{_DIFFERENT}"
            )
        if problems:
            raise TrainingStopped(
                "the rollouts of this step do not fit the policy; nothing was learned from them:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )


def dropped_tokens(groups: Sequence[RolloutGroup]) -> Metric:
    """The share of sampled tokens whose rollout log-probability is not finite: those that no loss sees."""
    dropped = sampled = 0
    for completion in (rollout.completion for group in groups for rollout in group.rollouts):
        if completion.logprobs is None:
            continue
        finite = completion.logprobs.isfinite()
        chosen = torch.ones_like(finite) if completion.loss_mask is None else completion.loss_mask
        dropped += int((chosen & ~finite).sum())
        sampled += int(chosen.sum())
    return Metric(dropped, sampled)
