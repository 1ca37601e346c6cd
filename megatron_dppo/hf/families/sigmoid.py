"""MoE with sigmoid routers and a bias, shared experts, and dense first layers: GLM-4.5 and DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import common_shape, expert_fields, raise_unsupported, require_values
from megatron_dppo.hf.families.rules import EXPERTS, ROUTER_BIAS, gated
from megatron_dppo.types.model_folder import HfConfig

SIGMOID_EXPERTS = EXPERTS + ROUTER_BIAS + gated("mlp.shared_experts", "mlp.shared_experts")
SIGMOID_KEYS = ("scoring_func", "topk_method", "moe_layer_freq", "num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json that servers read, and not every transformers class has."""
SIGMOID_TINY: Mapping[str, object] = dict(
    moe_intermediate_size=48,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    num_mtp_layers=0,
    routed_scaling_factor=2.5,
)
_EXPERTS_PER_GROUP_SCORE = 2
"""Number of top experts whose scores add up to a group's score in transformers."""


def sigmoid_shape(hf_config: HfConfig, **family_fields: Any) -> ModelShape:
    """Return the sizes, with ``family_fields`` of one family."""
    require_values(hf_config, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    require_two_experts(hf_config)
    if not hf_config.routed_scaling_factor > 0:
        scale = hf_config.routed_scaling_factor
        raise_unsupported(
            hf_config, "routed_scaling_factor", scale, "a positive number (Megatron reads 0 as no factor)"
        )
    if hf_config.n_shared_experts < 1:
        raise_unsupported(hf_config, "n_shared_experts", hf_config.n_shared_experts, "1 or more")
    experts, groups = hf_config.n_routed_experts, hf_config.n_group
    if groups is None or experts % groups:
        raise_unsupported(hf_config, "n_group", groups, f"a divisor of the {experts} experts")
    if hf_config.topk_group is None or hf_config.topk_group > groups:
        raise_unsupported(hf_config, "topk_group", hf_config.topk_group, f"at most the {groups} groups")
    if _has_groups(hf_config) and hf_config.num_experts_per_tok // hf_config.topk_group != _EXPERTS_PER_GROUP_SCORE:
        raise_unsupported(
            hf_config,
            "topk_group",
            hf_config.topk_group,
            f"num_experts_per_tok / {_EXPERTS_PER_GROUP_SCORE} (for a group's score Megatron adds up "
            f"num_experts_per_tok / topk_group scores, the model {_EXPERTS_PER_GROUP_SCORE}), or n_group",
        )
    fields = {
        "num_experts": hf_config.n_routed_experts,
        "has_shared_expert": True,
        "has_router_bias": True,
        "num_mtp_layers": getattr(hf_config, "num_nextn_predict_layers", None) or 0,
    }
    if "dense_layers" not in family_fields:
        fields["dense_layers"] = tuple(range(min(hf_config.first_k_dense_replace, hf_config.num_hidden_layers)))
    return common_shape(hf_config, **fields, **family_fields)


def require_two_experts(hf_config: HfConfig) -> None:
    """Check that a token has several experts, whose scores Megatron normalizes."""
    if (count := hf_config.num_experts_per_tok) < 2:
        supported = "2 or more (Megatron does not normalize a single score)"
        raise_unsupported(hf_config, "num_experts_per_tok", count, supported)


SIGMOID_ROUTERS: Mapping[str, object] = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    # Megatron's default of 1e-3 would move the bias by load.
    moe_router_bias_update_rate=0.0,
)


def sigmoid_fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the TransformerConfig fields of experts and routers. The router biases are not updated."""
    groups = _has_groups(hf_config)
    return expert_fields(hf_config, shape) | dict(
        SIGMOID_ROUTERS,
        moe_router_topk_scaling_factor=hf_config.routed_scaling_factor,
        moe_router_num_groups=hf_config.n_group if groups else None,
        moe_router_group_topk=hf_config.topk_group if groups else None,
        moe_shared_expert_intermediate_size=hf_config.moe_intermediate_size * hf_config.n_shared_experts,
    )


def _has_groups(hf_config: HfConfig) -> bool:
    """Return True if the group limit excludes any experts."""
    return bool(hf_config.topk_group < hf_config.n_group)
