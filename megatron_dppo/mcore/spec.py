"""Layer specs: Transformer Engine's on CUDA if installed, else pure torch layers with the same names."""

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.mcore.delta_net import delta_net_spec
from megatron_dppo.mcore.head_norm import KeyNorm, QueryNorm
from megatron_dppo.mcore.invariant import InvariantCoreAttention, is_batch_invariant_mode_enabled
from megatron_dppo.mcore.transformer_engine import has_transformer_engine
from megatron_dppo_megatron_cpu.attention import SDPACoreAttention
from megatron_dppo_megatron_cpu.latent import LatentAttention, ReplicatedLinear
from megatron_dppo_megatron_cpu.layers import (
    ColumnParallelGroupedLinear,
    LayerNormColumnParallelLinear,
    RMSNorm,
    RowParallelGroupedLinear,
)


def block_spec(config: TransformerConfig, shape: ModelShape, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the specs of this pipeline stage's layers and of the final norm."""
    block = _block_spec(config, vp_stage)
    if shape.has_qk_norm_over_heads:
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    return block


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, vp_stage)
    if not config.use_cpu_initialization and has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        # See ``LatentAttention``: Megatron 0.19 would replace layers of the spec.
        if config.multi_latent_attention:
            for layer in block.layer_specs:
                layer.submodules.self_attention.module = LatentAttention
        return _with_linear_attention(block, config, first)
    layers = [_layer_spec(config, first + i) for i in range(get_num_layers_to_build(config, vp_stage))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _with_linear_attention(
    block: TransformerBlockSubmodules, config: TransformerConfig, first: int
) -> TransformerBlockSubmodules:
    """Replace attention of Transformer Engine's spec in the layers with linear attention; ``first`` is the stage's."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    attention = delta_net_spec(TELayerNormColumnParallelLinear, TERowParallelLinear)
    # A layer without linear attention may have the same spec object, and the norm is inside the projection in both.
    block.layer_specs = [
        replace(spec, submodules=replace(spec.submodules, self_attention=attention))
        if _has_linear_attention(config, first + i)
        else spec
        for i, spec in enumerate(block.layer_specs)
    ]
    return block


def _has_linear_attention(config: TransformerConfig, layer: int) -> bool:
    # As a list, ``linear_attention_freq`` has a 1 for each layer with linear attention.
    linear = config.linear_attention_freq
    return isinstance(linear, list) and bool(linear[layer])


def _layer_spec(config: TransformerConfig, layer: int) -> ModuleSpec:
    frequency = config.moe_layer_freq
    # As a list, ``moe_layer_freq`` has a 1 for each layer with experts.
    is_moe = config.num_moe_experts is not None and (not isinstance(frequency, list) or bool(frequency[layer]))
    is_mla = config.multi_latent_attention
    if _has_linear_attention(config, layer):
        attention = delta_net_spec(LayerNormColumnParallelLinear, RowParallelLinear)
    else:
        attention = _mla_spec() if is_mla else _grouped_spec(config)
    dense = MLPSubmodules(linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            # Grouped attention has its norm inside linear_qkv; MLA has two projections of the normalized input.
            input_layernorm=RMSNorm if is_mla else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            # A dense MLP has its norm inside linear_fc1, as in Transformer Engine.
            pre_mlp_layernorm=RMSNorm if is_moe else IdentityOp,
            mlp=_moe_spec() if is_moe else ModuleSpec(module=MLP, submodules=dense),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _grouped_spec(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LayerNormColumnParallelLinear,
            core_attention=InvariantCoreAttention if is_batch_invariant_mode_enabled() else SDPACoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
            k_layernorm=RMSNorm if config.qk_layernorm else IdentityOp,
        ),
    )


def _mla_spec() -> ModuleSpec:
    """Return the spec of MLA as with Transformer Engine: replicated latents, normalized in the up projections."""
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=LayerNormColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=LayerNormColumnParallelLinear,
            core_attention=SDPACoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def _moe_spec() -> ModuleSpec:
    experts = ModuleSpec(
        # Megatron's own expert MLP. Only its linear layers are Transformer Engine's, and these are replaced.
        module=TEGroupedMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear),
    )
    shared = ModuleSpec(
        module=SharedExpertMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=experts, shared_experts=shared),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
