"""A loss that is a plain function of the user's, ``path/to/file.py:function``; a class of the user's stands for itself.

    loss(inputs: LossInputs, **options) -> [T] terms, or ([T] terms, [T] bool, True = kept)

It is called with the inputs that it declares by ``losses.needs``; what comes back is checked (docs/loss.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.user_functions import FunctionNeeds, UserFunction, get_user_function, load_user_function
from megatron_dppo.losses.parts.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.losses import Decision, Tokens
    from megatron_dppo.types import LossInputs


class UserLoss(Loss):
    """A function of the user's in ``name``."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a function of your own in ``name``, beside its inputs."""

    forms: ClassVar[tuple[Form, ...]] = ()
    decides_gradient: ClassVar[bool] = False

    @property
    def user_loss(self) -> UserFunction:
        """The function in ``name``."""
        return get_user_function(self.name, "loss.name")

    @property
    def needs(self) -> FunctionNeeds:
        """Inputs that the function declares to need."""
        return self.user_loss.needs

    def load_functions(self) -> None:
        """Load the function itself, then the mask.

        Raises:
            FunctionError: one cannot be loaded, or declares what it cannot have.
        """
        load_user_function(self.name, "loss.name", self.options)
        super().load_functions()

    def decide(self, tokens: Tokens) -> Decision:
        """Keep everything: the function decides by itself."""
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))

    def terms(self, inputs: LossInputs, tokens: Tokens, decision: Decision) -> tuple[Tensor, Tensor]:
        """Call the function; 0 for tokens that a mask drops."""
        keep = decision.keep & tokens.mask
        terms, kept = losses.call_user_loss(self.user_loss, self.options, inputs, tokens)
        return keep & kept, terms.where(keep, 0.0)
