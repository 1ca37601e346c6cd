"""DPPO with a mask on log-probabilities that the trainer recomputed: an ablation, which the paper shows to diverge.

    grad = - sum over t of  A_t min(r_t, C) keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (D(pi', pi) > threshold and A_t (log pi - log pi') > 0)

Differentiated: log pi of the sampled token
Weight: pi / mu, capped (C = 5)
Mask: divergence of pi from pi' (recomputed by the trainer), by token; outward updates
Source: arXiv 2602.04879, section 5.2
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_dppo import losses
from megatron_dppo.losses.dppo import DPPOConfig, divergence_keep_mask


class RecomputeDPPO(DPPOConfig):
    """DPPO whose mask compares pi with log-probabilities that the trainer recomputed.

    Example:
        Both tokens have moved 0.1 from mu; the second has moved 0.2 from pi', and would move on.

        >>> config = RecomputeDPPO(name="dppo_recompute_binary_tv")
        >>> losses.show(config, pi=[0.5, 0.5], mu=[0.4, 0.4], recomputed=[0.4, 0.3], advantages=[1.0, 1.0])
        kept      True False
        gradient -1.25  0.00
    """

    name: Literal["dppo_recompute_binary_tv", "dppo_recompute_binary_kl"] = "dppo_recompute_binary_tv"

    mismatch_uses_recomputed: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask tokens that are further than the threshold from pi' and would move further away."""
        measure = losses.binary_kl if self.kind == "kl" else losses.binary_tv
        divergence = measure(tokens.logprobs, tokens.recomputed)
        keep = divergence_keep_mask(divergence, tokens.recomputed_log_ratio, tokens.advantages, *self.thresholds)
        # Only the mask is anchored on pi'. The weight stays pi / mu.
        return losses.weigh_by_ratio(tokens, divergence, keep)
