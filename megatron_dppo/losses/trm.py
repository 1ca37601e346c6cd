"""TRM: mask whole sequences of which one token, or the mean of all, has moved too far.

    grad = - sum over t of  A_t r_t keep(sequence of t) grad log pi(a_t | s_t),        r_t = pi / mu
    keep = max over the sequence of (log r)^2 / 2 <= sequence_max,  and mean of r - 1 - log r <= sequence_mean

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: largest and mean KL(mu || pi) of a sequence's tokens, by sequence; updates of either direction
Source: arXiv 2512.23075
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config.loss import TopKSummary


class TRM(RatioCap, Loss):
    """TRM: a sequence is kept or masked as a whole.

    Example:
        The second token has log r = 0.59. Half its square is 0.17, above 0.05, so the sequence is masked.

        >>> losses.show(TRM(), pi=[0.5, 0.9], mu=[0.49, 0.5], advantages=[1.0, -1.0])
        kept     False False
        gradient  0.00  0.00
        >>> by_mean = TRM(sequence_max="off", sequence_mean=0.2)
        >>> losses.show(by_mean, pi=[0.5, 0.9], mu=[0.49, 0.5], advantages=[1.0, -1.0])
        kept      True  True
        gradient -1.02  1.80
    """

    name: Literal["trm"] = "trm"
    divergence: Literal["sampled", "binary", "topk"] | None = None
    """Measure of both limits: estimates of KL(mu || pi) from the sampled token, or its Binary or Top-K form. null uses
    ``sampled`` for ``trm``."""
    sequence_max: Annotated[float, Field(gt=0)] | Literal["off"] = 0.05
    """A sequence with a token above this value is masked."""
    sequence_mean: Annotated[float, Field(gt=0)] | Literal["off"] = 0.001
    """A sequence whose mean over its tokens is above this value is masked."""

    @property
    def needs(self) -> FunctionNeeds:
        """Whole sequences, and the Top-K if the divergence is measured on it."""
        return FunctionNeeds(sequences=True, topk=self.divergence == "topk", zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Sums over the slots are enough: only the divergence is read."""
        return "divergence"

    def resolved_defaults(self) -> dict[str, Any]:
        """Add the divergence."""
        return {"divergence": "sampled"} | super().resolved_defaults()

    def check(self) -> None:
        """Check that at least one limit is set."""
        if self.sequence_max == self.sequence_mean == "off":
            raise ValueError(
                "sequence_max and sequence_mean are 'off', so trm would mask nothing. Fix: set one, or use pg_is."
            )
        super().check()

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask all tokens of a sequence that is beyond a limit."""
        # "off" is an infinite limit, which no finite divergence exceeds.
        largest = math.inf if self.sequence_max == "off" else self.sequence_max
        mean = math.inf if self.sequence_mean == "off" else self.sequence_mean
        peak, average = self._divergences(tokens)
        keep = losses.sequence_keep_mask(peak, average, tokens.mask, tokens.sequences, largest, mean)
        return losses.weigh_by_ratio(tokens, average, keep)

    def _divergences(self, tokens: losses.Tokens) -> tuple[Tensor, Tensor]:
        """Return the divergences that the maximum and the mean are taken of, [num_tokens] each."""
        if self.divergence == "topk":
            on_topk = tokens.topk_set.divergence("kl").to(tokens.log_ratio.dtype)
            return on_topk, on_topk
        if self.divergence == "binary":
            binary = losses.binary_kl(tokens.logprobs, tokens.rollout_logprobs)
            return binary, binary
        # The estimators k2 and k3 of KL(mu || pi) from one token.
        return tokens.log_ratio.square() / 2, tokens.log_ratio.expm1() - tokens.log_ratio
