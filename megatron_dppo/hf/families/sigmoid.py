"""Experts chosen by sigmoid scores plus a bias, beside shared ones, after dense layers: GLM-4.5 and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import common_shape, expert_fields, refuse, require_values
from megatron_dppo.hf.families.rules import EXPERTS, ROUTER_BIAS, gated

SIGMOID_EXPERTS = EXPERTS + ROUTER_BIAS + gated("mlp.shared_experts", "mlp.shared_experts")
_IN_GROUP = 2
"""Experts of a group whose scores add up to the group's, in transformers"""


def sigmoid_shape(hf_config: Any, **more: Any) -> ModelShape:
    """The sizes, with ``more`` of the family's own.

    Raises:
        CheckpointError: routing that Megatron has not.
    """
    require_values(hf_config, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    if hf_config.num_experts_per_tok < 2:
        refuse(
            hf_config, "num_experts_per_tok", hf_config.num_experts_per_tok, "2 and more (Megatron norms no single one)"
        )
    if hf_config.n_shared_experts < 1:
        refuse(hf_config, "n_shared_experts", hf_config.n_shared_experts, "1 and more")
    if _has_groups(hf_config) and hf_config.num_experts_per_tok // hf_config.topk_group != _IN_GROUP:
        refuse(
            hf_config,
            "topk_group",
            hf_config.topk_group,
            f"num_experts_per_tok / {_IN_GROUP} (Megatron takes num_experts_per_tok / topk_group scores for a group's, "
            f"the model {_IN_GROUP}), or n_group",
        )
    return common_shape(
        hf_config,
        num_experts=hf_config.n_routed_experts,
        dense_layers=tuple(range(min(hf_config.first_k_dense_replace, hf_config.num_hidden_layers))),
        has_shared_expert=True,
        has_router_bias=True,
        num_mtp_layers=getattr(hf_config, "num_nextn_predict_layers", None) or 0,
        **more,
    )


def sigmoid_fields(hf_config: Any, shape: ModelShape) -> dict[str, Any]:
    """Experts and routers in Megatron's configuration. The routers' biases stay as they are."""
    groups = _has_groups(hf_config)
    return expert_fields(hf_config, shape) | dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=hf_config.routed_scaling_factor,
        moe_router_num_groups=hf_config.n_group if groups else None,
        moe_router_group_topk=hf_config.topk_group if groups else None,
        moe_shared_expert_intermediate_size=hf_config.moe_intermediate_size * hf_config.n_shared_experts,
    )


def _has_groups(hf_config: Any) -> bool:
    """Whether the groups of experts exclude any."""
    return (hf_config.n_group or 1) > 1 and hf_config.topk_group < hf_config.n_group
