"""GRPO with clip-higher: PPO's trust region by the ratio, as a mask on a policy gradient.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (A_t > 0 and r_t > 1 + high, or A_t < 0 and r_t < 1 - low)

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: ratio pi / mu, by token; outward updates
Source: arXiv 2402.03300, clip-higher arXiv 2503.14476
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap, RatioClipping
from megatron_dppo.losses.adaptive import AdaptiveThresholds
from megatron_dppo.losses.rule import Loss


class GRPO(AdaptiveThresholds, RatioClipping, RatioCap, Loss):
    """GRPO; group-relative advantages are ``train.advantage``.

    Example:
        Ratios 1.25, 1.8 and 0.1 against 1.28 and 0.8. The rare third token is masked for a small move of probability.

        >>> losses.show(GRPO(), pi=[0.5, 0.9, 0.001], mu=[0.4, 0.5, 0.01], advantages=[1.0, 1.0, -1.0])
        kept      True False False
        gradient -1.25  0.00  0.00
    """

    name: Literal["grpo"] = "grpo"

    can_center: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask tokens whose ratio is beyond the limit of their side."""
        limits = losses.adapted_limits(self.clip_ratios, tokens, self)
        keep = losses.ratio_keep_mask(tokens.log_ratio, tokens.advantages, *limits)
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs), keep)
