"""M2PO: the second moment of the log ratios is bounded over the whole batch, by masking the largest ones.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep = all tokens, without those of the set T with the largest (log r)^2, so few that the mean of (log r)^2 over
           the rest of T is at most the limit
    T = the tokens whose update leads away from mu: A_t log r_t > 0

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: (log r)^2 against a limit that is one number for all tokens of an update
Source: arXiv 2510.01161, algorithm 1, of which the paper was not seen: as verl 4131, ms-swift 9965 and Trinity-RFT 616
state it. AReaL (5eec268) masks among all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from megatron_dppo.losses import Decision, Tokens


class M2PO(Loss):
    """M2PO. It needs one more forward pass in each update, since the mask of a token depends on all tokens.

    Example:
        The squares of log r are 0.05, 0.01 and 0.35 where the update leads away from mu. Their mean is 0.13; without
        the largest it is 0.03.

        >>> pi, mu, advantages = [0.5, 0.44, 0.9, 0.9], [0.4, 0.4, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0]
        >>> losses.show(M2PO(), pi=pi, mu=mu, advantages=advantages)
        kept      True  True False  True
        gradient -1.25 -1.10  0.00  1.80
    """

    name: Literal["m2po"] = "m2po"
    second_moment_limit: float = Field(0.04, gt=0)
    """Limit of the mean of (log r)^2 over the tokens that are left. The mask takes as few tokens as it can."""
    second_moment_tokens: Literal["outward", "all"] = "outward"
    """Tokens that the mean is taken over and that can be masked. ``outward``: those whose update leads away from mu.
    ``all``: also those whose update leads back, as in AReaL."""

    forms: ClassVar[tuple[Form, ...]] = ("reinforce",)

    def input_reasons(self) -> dict[str, str]:
        """Add the largest square that is kept."""
        return super().input_reasons() | {"largest_square": "loss.name"}

    def decide(self, tokens: Tokens) -> Decision:
        """Mask the tokens beyond the largest square that the batch keeps."""
        assert tokens.largest_square is not None
        squares = losses.squared_log_ratio(tokens.log_ratio)
        keep = squares <= tokens.largest_square
        if self.second_moment_tokens == "outward":
            keep = keep | (tokens.log_ratio * tokens.advantages <= 0)
        return losses.weigh_by_ratio(tokens, squares, keep)
