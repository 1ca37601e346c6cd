"""The ``[lora]`` section: adapters on a frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config

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


_PASSES_BY = {
    "moe_shared_expert_overlap": "the shared expert's layers then exchange nothing themselves",
    "use_transformer_engine_op_fuser": "the fused operations do not call the layers that have adapters",
    "moe_router_bias_update_rate": "checkpoints hold adapters alone, and would lose the biases",
    "delay_wgrad_compute": "frozen weights have no gradient that could be delayed",
}
"""Switches of Megatron's under which a layer is not computed as its adapter takes it to be."""


def check_lora(config: Config) -> None:
    """Whether the other sections fit adapters, or to be without.

    Raises:
        ValueError: one does not, with what to change.
    """
    if config.rollout.weight_sync.method == "adapter":
        _check_adapter_sync(config)
    if not config.lora.rank:
        return
    if config.warmup.num_steps:
        raise ValueError(
            f"lora.rank = {config.lora.rank} with warmup.num_steps = {config.warmup.num_steps}: the warm-up trains all "
            "weights. Warm up in a run without [lora], and set model.path to its RUN/base"
        )
    for key, reason in _PASSES_BY.items():
        if config.model.transformer.get(key):
            raise ValueError(
                f"lora.rank = {config.lora.rank} with model.transformer.{key} = "
                f"{config.model.transformer[key]!r}: {reason}. Leave it out"
            )


def _check_adapter_sync(config: Config) -> None:
    if not config.lora.rank:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with lora.rank = 0: there is no adapter to send. Set lora.rank, or "
            "the method to 'distributed' or 'disk'"
        )
    if config.model.random_init:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with model.random_init = true: the servers read the base model "
            "from model.path themselves, so its weights have to be there"
        )
