"""The section ``[train.layer_noise]``."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section
from megatron_dppo.errors import ConfigError


class LayerNoiseConfig(Section):
    """Adaptive layerwise perturbation (ALP, arXiv 2603.19470): in updates, and only there, each layer's input hidden
    states get Gaussian noise; pi is then the probability under noise, and mu stays the rollout's (docs/loss.md)."""

    std: float = Field(0.0, ge=0)
    """Initial standard deviation; 0 = no noise. Its authors start at 1e-6."""
    learn: bool = True
    """Each layer's standard deviation follows the gradient of the loss, by Adam on its logarithm."""
    lr: float = Field(5e-4, gt=0)
    """Learning rate of these logarithms; constant."""
    start_layer: int = Field(0, ge=0)
    """First layer with noise, counted from 0."""
    end_layer: int | None = Field(None, gt=0)
    """The one after the last layer with noise; None = to the end."""

    @model_validator(mode="after")
    def _has_effect(self) -> LayerNoiseConfig:
        changed = self.changed()
        if changed and not self.std:
            key = changed[0]
            raise ValueError(f"layer_noise.{key} = {getattr(self, key)!r} has no effect with std = 0; set std, as 1e-6")
        if not self.learn and "lr" in changed:
            raise ValueError(f"layer_noise.lr = {self.lr!r} has no effect with learn = false")
        if self.end_layer is not None and self.end_layer <= self.start_layer:
            raise ValueError(
                f"layer_noise.end_layer = {self.end_layer} is not above start_layer = {self.start_layer}: no layer is "
                "left. end_layer is the one after the last"
            )
        return self

    def layers(self, num_layers: int) -> range:
        """Those with noise in a model of ``num_layers``.

        Raises:
            ConfigError: the model has no such layer.
        """
        end = num_layers if self.end_layer is None else self.end_layer
        if end > num_layers or self.start_layer >= num_layers:
            raise ConfigError(
                f"train.layer_noise: start_layer = {self.start_layer} and end_layer = {self.end_layer} of a model with "
                f"{num_layers} layers. Set start_layer below {num_layers}, and end_layer to {num_layers} at most or "
                "not at all"
            )
        return range(self.start_layer, end)
