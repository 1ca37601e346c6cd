"""The ``[lora]`` section: adapters on a frozen base model."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)
_ALPHA_OF_RANK = 2.0


class LoraConfig(Section):
    """Low-rank adapters; all else is frozen, also embeddings, output layer, norms and routers (docs/lora.md)."""

    rank: int = Field(0, ge=0)
    """Of each adapter; 0 = none, all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """A weight becomes W + alpha / rank * B A; None = 2 * rank."""
    target_modules: list[Target] = Field(default_factory=lambda: list(TARGETS), min_length=1)
    """Which linear layers, in PEFT's names: of attention, and of MLPs, experts (each expert has adapters of its own)
    and shared experts."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return _ALPHA_OF_RANK if self.alpha is None else self.alpha / self.rank

    @model_validator(mode="after")
    def _has_effect(self) -> LoraConfig:
        changed = self.changed()
        if changed and not self.rank:
            raise ValueError(f"lora.{changed[0]} = {getattr(self, changed[0])!r} has no effect with rank = 0; set rank")
        twice = sorted({name for name in self.target_modules if self.target_modules.count(name) > 1})
        if twice:
            raise ValueError(f"lora.target_modules names {', '.join(twice)} more than once")
        return self
