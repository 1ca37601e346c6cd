"""Interface of deliberate differences between the local engine and the policy; an installed package has them."""

from typing import Any, Protocol

import torch

from megatron_dppo.types import RoutingShape


class PerturbedModel(Protocol):
    """A transformers model that was changed in place."""

    def quantize_weights(self) -> None:
        """Quantize the weights that were just copied into the model."""

    def seed_noise(self, seed: int, device: torch.device, /) -> None:
        """Seed the noise of one call, so that equal calls get equal noise."""


class Perturbation(Protocol):
    """Values of ``[rollout.perturbation]``."""

    @property
    def unrecorded_top_p(self) -> float:
        """Top-p filter that the log-probabilities do not include; 1 disables it."""

    @property
    def unrecorded_temperature(self) -> float:
        """Factor of the temperature that the log-probabilities do not include."""

    def apply(self, model: Any, routing: RoutingShape | None, /) -> PerturbedModel:
        """Change a model in place."""

    def check(self) -> None:
        """Check that the packages that it needs can be imported."""
