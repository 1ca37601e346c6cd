"""GLM-4.5 and GLM-4.5-Air: sigmoid routers, shared experts, partial rotary embedding."""

from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import Family, Published, grouped_fields, partial_rope
from megatron_dppo.hf.families.sigmoid import SIGMOID_EXPERTS, SIGMOID_KEYS, SIGMOID_TINY, sigmoid_fields, sigmoid_shape
from megatron_dppo.types.model_folder import HfConfig


def _shape(hf_config: HfConfig) -> ModelShape:
    return sigmoid_shape(hf_config, has_qkv_bias=hf_config.attention_bias, has_qk_norm=hf_config.use_qk_norm)


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return grouped_fields(hf_config, shape) | sigmoid_fields(hf_config, shape)


_GLM_4_5_AIR: dict[str, object] = {"attention_bias": True, "head_dim": 128}
_GLM_4_5 = _GLM_4_5_AIR | dict(
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=92,
    n_routed_experts=160,
    first_k_dense_replace=3,
    use_qk_norm=True,
    routed_scaling_factor=2.5,
)
FAMILIES = (
    Family(
        model_type="glm4_moe",
        hf_class="Glm4MoeForCausalLM",
        models="GLM-4.5, GLM-4.5-Air",
        features="sigmoid routers with a bias, shared experts, first layers dense, half of a head rotated",
        tiny={
            **SIGMOID_TINY,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        published=(
            Published("GLM-4.5-Air", _GLM_4_5_AIR, 106.9, (106, 12)),
            Published("GLM-4.5", _GLM_4_5, 352.8, (355, 32)),
        ),
        shape=_shape,
        fields=_fields,
        rope=partial_rope,
        experts=SIGMOID_EXPERTS,
        other_keys=SIGMOID_KEYS,
    ),
)
