"""Megatron's fused kernels and FP8: defaults, checks, and what a run reports about them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.delta_rule import FLA, TORCH_KERNELS, choose_kernels, has_fla
from megatron_dppo.mcore.transformer_engine import install_command
from megatron_dppo.parallel.platform import Platform

FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
"""Fields of TransformerConfig: RoPE of packed rows, sorting tokens by expert (both without waiting for the device),
SwiGLU in one kernel, and weight gradients that are added to Megatron's buffer by the GEMM that makes them."""
_OTHER_ACTIVATION = {
    "use_te_activation_func": "Transformer Engine's own activation is chosen",
    "activation_func_clamp_value": "the fused SwiGLU does not clamp",
    "glu_linear_offset": "the fused SwiGLU has no offset",
}
"""Fields of ``model.transformer`` with which the fused SwiGLU would compute something else, or Megatron refuses it."""


def default_fusions(overrides: Mapping[str, object], *, is_cuda: bool, engine: bool, experts: bool) -> dict[str, bool]:
    """Return the fields of ``FUSIONS``: on with Transformer Engine (``engine``), off without it and on CPU.

    Values in ``overrides`` (``model.transformer``) come after these defaults. Router replay goes with all of them: it
    sets the experts of a token before any of these kernels runs. (The one that does not ask for replayed experts,
    ``moe_router_fusion``, is refused with it.)
    """
    adds = is_cuda and (engine or has_apex_gradient_kernel())
    if overrides.get("gradient_accumulation_fusion") and not adds:
        raise ConfigError(
            "model.transformer.gradient_accumulation_fusion = true: it needs Transformer Engine, or Apex built with "
            "--cpp_ext and --cuda_ext, on CUDA; install one of them, or leave the key out"
        )
    return dict(
        apply_rope_fusion=engine and has_fused_rope(),
        moe_permute_fusion=engine and experts and has_fused_permute(),
        bias_activation_fusion=engine and not any(overrides.get(name) for name in _OTHER_ACTIVATION),
        gradient_accumulation_fusion=adds,
    )


def has_apex_gradient_kernel() -> bool:
    """Return True if Apex has the kernel with which Megatron's linear layers accumulate weight gradients."""
    return layers._grad_accum_fusion_available


def has_fused_rope() -> bool:
    """Megatron binds the name to None where Transformer Engine is too old (1.4)."""
    from megatron.core.models.common.embeddings import rope_utils

    return rope_utils.fused_apply_rotary_pos_emb_thd is not None


def has_fused_permute() -> bool:
    """Likewise (2.1)."""
    from megatron.core.transformer.moe import moe_utils

    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    return all(getattr(moe_utils, f"fused_{name}", None) is not None for name in names)


@contextmanager
def output_layer_without_fusion() -> Iterator[list[GPTModel]]:
    """Around building models: ``gradient_accumulation_fusion`` is for all linear layers but the output layer.

    Yields the list that the built models have to be put in. The output layer's weight gradient is the head's. Reason:
    Megatron has one flag for all layers, and its own linear layers reject it without Apex; with Transformer Engine's
    layers the output layer is the only one of them. Affected: Megatron Core 0.16.1 to 0.19.2. Delete when: Megatron
    builds an output layer without Apex.
    """
    available, built = has_apex_gradient_kernel(), list[GPTModel]()
    layers._grad_accum_fusion_available = True
    try:
        yield built
    finally:
        layers._grad_accum_fusion_available = available
    for model in built:
        if model.post_process:
            model.output_layer.gradient_accumulation_fusion = False


def summarize_kernels(config: TransformerConfig, overrides: Mapping[str, object], *, engine: bool) -> str:
    """One line for the start of a run on CUDA."""
    return _summarize_fusions(config, overrides, engine=engine) + _summarize_delta_nets(config)


def _summarize_delta_nets(config: TransformerConfig) -> str:
    if config.linear_attention_freq is None:
        return ""
    if choose_kernels(config) is not TORCH_KERNELS:
        return "; gated delta nets by flash-linear-attention"
    if not has_fla():
        return f"; warning: gated delta nets by plain torch, slower and with more memory: pip install '{FLA}'"
    return "; gated delta nets by plain torch: flash-linear-attention is for bf16 and fp16, without deterministic_mode"


def _summarize_fusions(config: TransformerConfig, overrides: Mapping[str, object], *, engine: bool) -> str:
    off = [name for name in FUSIONS if not getattr(config, name)]
    if not engine:
        experts = "" if config.num_moe_experts is None else ", experts by torch's grouped GEMM in bf16"
        return (
            f"warning: no Transformer Engine here: plain torch layers{experts}, without {', '.join(off)}; slower. "
            f"{install_command()}"
        )
    reasons = [_why_off(name, config, overrides) for name in off]
    on = [name for name in FUSIONS if getattr(config, name)]
    return (
        "kernels  Transformer Engine"
        + (f" with {', '.join(on)}" if on else "")
        + "".join(f"; without {name}: {reason}" for name, reason in zip(off, reasons, strict=True) if reason)
    )


def _why_off(name: str, config: TransformerConfig, overrides: Mapping[str, object]) -> str:
    if name == "moe_permute_fusion" and config.num_moe_experts is None:
        return ""
    if name in overrides:
        return "model.transformer says so"
    if name == "apply_rope_fusion" and config.multi_latent_attention:
        return "Megatron's kernel for latent attention is experimental"
    if name == "apply_rope_fusion" and hasattr(config, "yarn_rotary_scaling_factor"):
        return "Megatron's kernel leaves out YaRN's factor"
    if name == "bias_activation_fusion":
        return next(reason for field, reason in _OTHER_ACTIVATION.items() if overrides.get(field))
    return "this Transformer Engine is too old for it (1.4 for RoPE, 2.1 for the experts)"


_CAPABILITY = (8, 9)
"""Lowest compute capability with FP8 matrix products (Ada, Hopper)."""
_BLACKWELL = (10, 0)


def check_fp8(fields: Mapping[str, object], dtype: str, platform: Platform, *, transformer_engine: bool) -> None:
    """Check that this machine supports ``fields["fp8"]`` of ``model.transformer``, with ``model.dtype``."""
    keys = [key for key in fields if key.startswith("fp8_")]
    if not fields.get("fp8"):
        if keys:
            raise ConfigError(
                f"model.transformer.{keys[0]} = {fields[keys[0]]!r} has no effect without model.transformer.fp8 = "
                "'hybrid' or 'e4m3'; set that too, or leave it out"
            )
        return
    name = f"model.transformer.fp8 = {fields['fp8']!r}"
    if dtype != "bf16":
        raise ConfigError(
            f"{name} with model.dtype = {dtype!r}: weights and activations outside of FP8 are bf16. Set 'bf16'"
        )
    if not platform.is_cuda or not transformer_engine:
        there = "there is no GPU" if not platform.is_cuda else "Transformer Engine is not installed"
        raise ConfigError(
            f"{name} needs Transformer Engine on a GPU with FP8 (compute capability 8.9 and above: Ada, Hopper, "
            f"Blackwell); here {there}. Leave it out"
        )
    capability = torch.cuda.get_device_capability(platform.device)
    needed = _BLACKWELL if fields.get("fp8_recipe") == "mxfp8" else _CAPABILITY
    if capability < needed:
        recipe = "" if needed == _CAPABILITY else " with fp8_recipe = 'mxfp8'"
        raise ConfigError(
            f"{name}{recipe} needs a GPU of compute capability {needed[0]}.{needed[1]} or above, this one has "
            f"{capability[0]}.{capability[1]}. Leave it out"
        )


def row_multiple(fields: Mapping[str, object]) -> int:
    """Return the multiple that the number of tokens of a GEMM must be: 1 without FP8."""
    return int(get_fp8_align_size(fields.get("fp8_recipe", "delayed"))) if fields.get("fp8") else 1
