"""Guard of each step's first update, against rollouts that do not fit the policy.

Before the first update the policy and the rollout engine have the same weights, so their probabilities differ by
rounding alone. A larger difference means wrong data, and the run stops before it learns from it.
"""

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

_MAX_PROB_DIFF = {
    # One limit per dtype, for every engine: the engines differ by less than the distance to these limits.
    # docs/probe.md has the measurements.
    "fp32": 1e-3,
    "fp16": 0.015,
    "bf16": 0.06,
}
"""Default limit of the mean |pi - mu| of an on-policy update, by the coarser dtype of engine and trainer."""

_DROPPED_CAUSES = (
    "Likely causes: overflow in the engine's half precision (try rollout.dtype = 'fp32', or bf16 instead of fp16), a "
    "sampling filter, or a proxy that rewrites the server's responses"
)
_DIFFERENCE_CAUSES = (
    "Likely causes: log-probabilities, tokens or routed experts of another position or request; log-probabilities at "
    "another temperature; other weights than were sent; a coarser type in the engine than rollout.dtype says "
    "(quantized weights or cache, TF32). Run the probe after every sync (rollout.weight_sync.probe_every = 1) and use "
    "the URLs of the servers themselves, without a gateway. If the engine is meant to be that coarse, raise "
    "train.max_first_prob_diff"
)


@dataclass(frozen=True, kw_only=True)
class FirstUpdateGuard:
    """Limits that the first update of a step must keep."""

    max_prob_diff: float | None
    """Limit of the mean |pi - mu|. None disables the check."""
    max_nonfinite_fraction: float | None
    """Limit of ``nonfinite_fraction``. None disables the check."""
    nonfinite_fraction: float
    """Share of this step's sampled tokens without a finite rollout log-probability, over all ranks."""
    engine: str
    """Name of the rollout engine, for the message."""
    dtype: str
    """The coarser dtype of engine and trainer."""
    noise: float = 0.0
    """``train.layer_noise.std``, which the policy's probabilities include."""

    @classmethod
    def from_config(
        cls,
        train: TrainConfig,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        nonfinite_fraction: float,
        is_on_policy: bool,
    ) -> FirstUpdateGuard:
        """Return the guard of one step.

        Args:
            train: Configured limits.
            rollout: Engine and its dtype, which the default limits follow from.
            model: Dtype of the trainer.
            nonfinite_fraction: See the field.
            is_on_policy: True if the current weights sampled every token of the step. Tokens of older weights also
                differ by the updates since, for which there is no limit.
        """
        dtype = coarser(rollout.rounding_dtype, model.dtype)
        # A perturbed engine differs on purpose; the trainer's own model must agree to the bit.
        default = None if rollout.perturbation.is_active else _MAX_PROB_DIFF[dtype]
        if rollout.batch_invariant:
            default = 0.0
        configured = train.max_first_prob_diff
        limit = default if configured == "auto" else None if configured == "off" else configured
        return cls(
            max_prob_diff=limit if is_on_policy else None,
            max_nonfinite_fraction=None if train.max_nonfinite_fraction == "off" else train.max_nonfinite_fraction,
            nonfinite_fraction=nonfinite_fraction,
            engine=rollout.engine,
            dtype=dtype,
            noise=train.layer_noise.std,
        )

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Check the reduced metrics of the first update before it is applied. They are the same on every rank.

        Raises:
            TrainingStopped: A limit is exceeded. The message names the numbers, the limits and likely causes.
        """
        problems = []
        # Written as `not a <= b` so that NaN counts as exceeded.
        if self.max_nonfinite_fraction is not None and not self.nonfinite_fraction <= self.max_nonfinite_fraction:
            problems.append(
                f"{self.nonfinite_fraction:.2%} of the sampled tokens have no finite rollout log-probability and would "
                f"be dropped from the loss; train.max_nonfinite_fraction = {self.max_nonfinite_fraction:g}. "
                f"{_DROPPED_CAUSES}"
            )
        difference = metrics["abs_prob_diff"]
        if self.max_prob_diff is not None and not difference <= self.max_prob_diff:
            noise = (
                f"The policy includes train.layer_noise.std = {self.noise:g}, which makes a difference by itself: "
                "lower it, or raise train.max_first_prob_diff. "
            )
            problems.append(
                f"the policy's probabilities of the sampled tokens differ from those that the engine "
                f"{self.engine!r} reported by {difference:.3g} on average, before the first update of the step, where "
                f"both have the same weights; {self.dtype} allows {self.max_prob_diff:g} "
                f"(train.max_first_prob_diff). {noise if self.noise else ''}{_DIFFERENCE_CAUSES}"
            )
        if problems:
            raise TrainingStopped(
                "the rollouts of this step do not fit the policy; nothing was learned from them:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )


def count_nonfinite_tokens(groups: Sequence[RolloutGroup]) -> Metric:
    """Return the share of sampled tokens whose rollout log-probability is not finite; no loss includes them."""
    num_nonfinite = 0
    num_sampled = 0
    for completion in (rollout.completion for group in groups for rollout in group.rollouts):
        if completion.logprobs is None:
            continue
        is_finite = completion.logprobs.isfinite()
        is_sampled = torch.ones_like(is_finite) if completion.loss_mask is None else completion.loss_mask
        num_nonfinite += int((is_sampled & ~is_finite).sum())
        num_sampled += int(is_sampled.sum())
    return Metric(num_nonfinite, num_sampled)
