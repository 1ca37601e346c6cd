"""MiniRL: GRPO's mask measured on the trainer's own probabilities, with the weight corrected to the engine's.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (A_t > 0 and pi / pi' > 1 + high, or A_t < 0 and pi / pi' < 1 - low)

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: ratio of pi to pi' (recomputed by the trainer), by token; outward updates
Source: arXiv 2512.01374
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap, RatioClipping
from megatron_dppo.losses.rule import Loss


class MiniRL(RatioClipping, RatioCap, Loss):
    """MiniRL; ``ratio_cap`` makes it MiniRL-TIS.

    Example:
        The first token has pi = 1.25 pi', the second pi = 1.67 pi'. Both have pi = 1.25 mu.

        >>> losses.show(MiniRL(), pi=[0.5, 0.5], mu=[0.4, 0.4], recomputed=[0.4, 0.3], advantages=[1.0, 1.0])
        kept      True False
        gradient -1.25  0.00
    """

    name: Literal["minirl"] = "minirl"

    mismatch_uses_recomputed: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask tokens whose ratio to pi' is beyond the limit of their side."""
        keep = losses.ratio_keep_mask(tokens.recomputed_log_ratio, tokens.advantages, *self.clip_ratios)
        # The mask reads pi / pi', the weight pi / mu.
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs), keep)
