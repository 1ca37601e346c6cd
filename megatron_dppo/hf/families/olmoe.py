"""OLMoE: norms over all heads of queries and keys, and routers whose weights add up to less than 1."""

from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    common_shape,
    expert_fields,
    grouped_fields,
    head_dim,
    raise_unsupported,
    require_values,
)
from megatron_dppo.types.model_folder import HfConfig


def _shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, attention_bias=False, clip_qkv=None)
    # transformers gives the norms the size of the hidden state, whatever the size of a head.
    if head_dim(hf_config) * hf_config.num_attention_heads != hf_config.hidden_size:
        raise_unsupported(hf_config, "head_dim", head_dim(hf_config), "hidden_size / num_attention_heads")
    return common_shape(hf_config, num_experts=hf_config.num_experts, has_qk_norm=True, has_qk_norm_over_heads=True)


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    # Megatron's softmax before the choice of experts leaves the sum of the weights below 1.
    routers = {"moe_router_pre_softmax": not hf_config.norm_topk_prob}
    return grouped_fields(hf_config, shape) | expert_fields(hf_config, shape) | routers


FAMILIES = (
    Family(
        model_type="olmoe",
        hf_class="OlmoeForCausalLM",
        models="OLMoE-1B-7B",
        features="norms over all heads of q and k; combine weights below 1 in sum",
        # transformers gives a padding token's embedding no gradient; the random samples of the test contain it.
        tiny={"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": 2},
        published=(Published("OLMoE-1B-7B", {"intermediate_size": 1024}, 6.92, (6.9, 1.3)),),
        shape=_shape,
        fields=_fields,
        # Servers have this number in their code.
        served_keys=lambda values: {"rms_norm_eps": 1e-5},
    ),
)
