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

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form, Statistic
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor


_MAX_LOG_RATIO = 80.0
"""As in ``Tokens``: a log ratio of -inf, where pi is 0, must not make the limit infinite."""


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

    def update_statistics(self) -> Mapping[str, Statistic]:
        """Add the largest square that is kept."""
        return {**super().update_statistics(), "largest_square": self.largest_square}

    def largest_square(self, tokens: losses.BatchTokens) -> float:
        """Return the limit of (log r)^2 with which the mean over the tokens that are left is small enough."""
        squares = _squares(tokens.log_ratio)
        if self.second_moment_tokens == "outward":
            squares = squares[tokens.log_ratio * tokens.advantages > 0]
        return largest_square(squares, self.second_moment_limit)

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask the tokens beyond the largest square that the batch keeps."""
        squares = _squares(tokens.log_ratio)
        keep = squares <= tokens.statistic("largest_square")
        if self.second_moment_tokens == "outward":
            keep = keep | (tokens.log_ratio * tokens.advantages <= 0)
        return losses.weigh_by_ratio(tokens, squares, keep)


def _squares(log_ratio: Tensor) -> Tensor:
    """Return the squares of finite log ratios."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).square()


def largest_square(squares: Tensor, limit: float) -> float:
    """Return the number that separates the squares of the batch that are kept from those that are masked.

    It is halfway between the two, so that the rounding of a second forward pass changes nothing. Equal squares are kept
    or masked together. Infinity where all are kept.

    Example: The means of the one, two and three smallest are 0.01, 0.03 and 0.14. The third is masked:

        >>> round(largest_square(torch.tensor([0.05, 0.01, 0.36]), limit=0.04), 3)
        0.205
    """
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / ordered.new_ones(len(ordered)).cumsum(0)
    count = int((means <= limit).sum())
    if count == len(ordered):
        return float("inf")
    smallest_masked = ordered[count]
    below = ordered[ordered < smallest_masked]
    largest_below = float(below[-1]) if len(below) else 0.0
    return (largest_below + float(smallest_masked)) / 2
