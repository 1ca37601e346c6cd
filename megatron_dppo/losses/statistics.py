"""Statistics of a batch: numbers that a loss reads beside its tokens, such as a median over all of them.

A loss declares them by name, each with the function that computes it from the tokens of all data-parallel ranks. The
trainer computes ``step_statistics`` once a step, with the weights that it starts with, and ``update_statistics`` before
each update, with the weights of that moment. ``batch_statistics`` computes both for tokens that are all in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config.loss import LossConfig, Statistic
    from megatron_dppo.types import LossInputs


class BatchTokens(NamedTuple):
    """Tokens of a batch that are in the loss: those of the loss mask with a finite log mu. Shape [num_tokens] each."""

    logprobs: Tensor
    """Log pi, without gradient."""
    rollout_logprobs: Tensor
    """Log mu."""
    advantages: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Log pi - log mu. It may be -inf, where pi is 0."""
        return self.logprobs - self.rollout_logprobs

    @classmethod
    def select(cls, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> BatchTokens:
        """Return the tokens that are in the loss."""
        mask = loss_mask & rollout_logprobs.isfinite()
        return cls(logprobs.detach()[mask], rollout_logprobs[mask], advantages[mask])


def compute_statistics(declared: Mapping[str, Statistic], tokens: BatchTokens) -> dict[str, float]:
    """Return the statistics of a batch by name; NaN without tokens, where no loss reads them."""
    if not len(tokens.logprobs):
        return dict.fromkeys(declared, float("nan"))
    return {name: float(statistic(tokens)) for name, statistic in declared.items()}


def batch_statistics(inputs: LossInputs, config: LossConfig) -> dict[str, float]:
    """Return all statistics of a loss, as ``LossInputs.statistics``, of tokens that are the whole batch.

    Example:
        >>> logprobs = torch.tensor([0.5, 0.44, 0.9]).log()
        >>> mu = torch.tensor([0.4, 0.4, 0.5]).log()
        >>> mask = torch.tensor([True, True, True])
        >>> inputs = LossInputs(logprobs=logprobs, rollout_logprobs=mu, advantages=torch.ones(3), loss_mask=mask)
        >>> {name: round(x, 3) for name, x in batch_statistics(inputs, LossConfig(name="m2po")).items()}
        {'largest_square': 0.198}
    """
    declared = config.declared_statistics()
    if not declared:
        return {}
    assert inputs.rollout_logprobs is not None
    tokens = BatchTokens.select(inputs.logprobs, inputs.rollout_logprobs, inputs.advantages, inputs.loss_mask)
    return compute_statistics(declared, tokens)
