"""The family of models that Megatron Bridge builds: sizes that most config.json have, and no rules.

``model.provider = "megatron-bridge"`` reads a model without a file of its own with it. Nothing of config.json is
refused here: what a key means is decided by Megatron Bridge.
"""

from typing import Any, NoReturn

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.family import Family, head_dim
from megatron_dppo.types.model_folder import HfConfig

MARK = "is_bridged"
"""Attribute of a transformers configuration whose model Megatron Bridge builds."""
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def _shape(hf_config: HfConfig) -> ModelShape:
    num_experts = next((value for key in _NUM_EXPERTS if (value := getattr(hf_config, key, None))), None)
    return ModelShape(
        family=hf_config.model_type,
        num_layers=hf_config.num_hidden_layers,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads,
        hidden_size=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        num_experts=num_experts,
        num_mtp_layers=getattr(hf_config, "num_nextn_predict_layers", None) or 0,
    )


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the sizes from which the cost of a token is estimated; every layer is taken to be like the others."""
    fields: dict[str, Any] = {"kv_channels": head_dim(hf_config)}
    if shape.num_experts is not None:
        fields["moe_router_topk"] = getattr(hf_config, "num_experts_per_tok", 1)
        fields["moe_ffn_hidden_size"] = getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size
    return fields


def _no_rules(_: HfConfig | ModelShape) -> NoReturn:
    raise CheckpointError("Megatron Bridge has the names and shards of this model's weights; there are no rules here")


BRIDGED = Family(
    model_type="",
    hf_class="",
    models="",
    features="",
    tiny={},
    shape=_shape,
    fields=_fields,
    rope=_no_rules,
    attention=_no_rules,
    dense=(),
    experts=(),
)
