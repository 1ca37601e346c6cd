"""The section ``[rollout.perturbation]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dppo.config.section import Section


class PerturbationConfig(Section):
    """A known difference between the local engine and the policy, for experiments with trust regions
    (``docs/experiments.md``); the engine's dtype is ``rollout.dtype``, and old weights are ``train.max_staleness``.
    Evaluation samples with the perturbed engine too."""

    weights: Literal["none", "fp8", "int8", "int4"] = "none"
    """Round the engine's copy of the linear weights at each publish, by nvidia-modelopt's fake quantizers (the extra
    ``[modelopt]``): FP8 with a scale a tensor, INT8 a channel, INT4 a block of 128. Embedding, output layer and routers
    stay as they are."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on the logits of the engine's routers, new for each token that is read; the
    same in each run of one seed."""
    unrecorded_top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most probable tokens up to this mass, but report log-probabilities of the whole distribution, which
    training takes as they are: an engine that hides its filter. Not for temperature 0."""

    @property
    def is_active(self) -> bool:
        """Whether anything is changed."""
        return self != type(self)()
