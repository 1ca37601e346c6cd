"""A user-defined loss in the form of a function, ``path/to/file.py:function``.

    loss(inputs: LossInputs, **options) -> [num_tokens] terms, or (terms, [num_tokens] bool, True = kept)

The function is called with the inputs that it declares by ``losses.needs``. Its result is checked (docs/loss.md). A
user-defined class derives from ``Loss`` and does not need this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.user_functions import FunctionNeeds, UserFunction, load_user_function
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.types import LossInputs


class UserLoss(Loss):
    """The loss of the user-defined function in ``name``."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function in ``name``, besides its inputs."""

    forms: ClassVar[tuple[Form, ...]] = ()
    decides_gradient: ClassVar[bool] = False

    @property
    def user_loss(self) -> UserFunction:
        """The loaded function."""
        return self.get_function(self.name, "loss.name")

    @property
    def needs(self) -> FunctionNeeds:
        """Inputs that the function declares."""
        return self.user_loss.needs

    def load_functions(self) -> None:
        """Load the function, then the mask."""
        load_user_function(self.name, "loss.name", self.options)
        super().load_functions()

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token: the function itself decides."""
        # Weight and divergence are only for the metrics: ``terms`` calls the function for value and gradient.
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))

    def terms(self, inputs: LossInputs, tokens: losses.Tokens, decision: losses.Decision) -> tuple[Tensor, Tensor]:
        """Call the function; a masked token has the term 0."""
        keep = decision.keep & tokens.mask
        terms, keep_by_user = losses.call_user_loss(self.user_loss, self.options, inputs, tokens)
        return keep & keep_by_user, terms.where(keep, 0.0)


class TextLoss(UserLoss):
    """The loss of a user's function or class that is not imported (``config.user_functions.functions_as_text``)."""

    # The class may have keys of its own, which only its file knows.
    model_config = ConfigDict(extra="allow")
