"""The form of every loss, built in or of the user's: a table of keys, and what it decides for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megatron_dppo.config.loss import LossConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.losses.decision import Decision
    from megatron_dppo.losses.tokens import Tokens
    from megatron_dppo.types import LossInputs


class Loss(LossConfig):
    """A loss: its fields are its keys in ``[loss]``, beside those that all share.

    It declares the inputs that it ``needs`` and overrides ``decide``; ``terms`` only where the gradient is not
    ``A w M grad log pi``. Sums, means over sequences, penalty, bonus and mismatch masks are applied to every loss.
    """

    decides_gradient: ClassVar[bool] = True
    """``decide`` says all that counterfactuals compare; False = their gradient is that of ``terms``."""

    def decide(self, tokens: Tokens) -> Decision:
        """Return mask and weight of every token, without gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no decide(tokens)")

    def terms(self, inputs: LossInputs, tokens: Tokens, decision: Decision) -> tuple[Tensor, Tensor]:
        """Return which tokens are kept, and the term of each with its gradient, ``[T]`` both.

        Args:
            inputs: Inputs of the loss, with the loss mask of ``tokens``.
            tokens: The prepared inputs.
            decision: Result of ``decide``, after the mismatch mask and the user's mask.
        """
        # Loads torch, which a configuration does without.
        from megatron_dppo.losses.decision import policy_term

        keep = decision.keep & tokens.mask
        return keep, policy_term(tokens, decision, keep, self)


def as_loss(config: LossConfig) -> Loss:
    """Return a configuration as the loss that it is."""
    if not isinstance(config, Loss):
        raise TypeError(f"{type(config).__name__} is no loss; derive it from megatron_dppo.losses.Loss")
    return config
