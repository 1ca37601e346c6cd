"""Llama 2 and 3, and Mistral without a sliding window."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Rope,
    common_shape,
    default_rope,
    grouped_fields,
    raise_unsupported,
    require_values,
    rope_number,
    rope_parameters,
)
from megatron_dppo.hf.families.rules import DENSE_MLP, grouped_attention

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that Megatron's Llama 3 scaling fixes; all released Llama 3 models have them."""


def _shape(hf_config: Any) -> ModelShape:
    require_values(hf_config, attention_bias=False, sliding_window=None)
    return common_shape(hf_config)


def _rope(hf_config: Any) -> Rope:
    parameters = rope_parameters(hf_config, "default", "llama3")
    if parameters["rope_type"] == "default":
        return default_rope(hf_config)
    for key, value in _LLAMA3.items():
        if (stored := parameters.get(key)) != value:
            raise_unsupported(hf_config, f"rope_parameters.{key}", stored, f"{value!r} (fixed in Megatron)")
    return Rope(parameters["rope_theta"], llama3_factor=rope_number(hf_config, parameters, "factor"))


_family = partial(Family, shape=_shape, fields=grouped_fields, attention=grouped_attention, dense=DENSE_MLP)
FAMILIES = (
    _family(model_type="llama", hf_class="LlamaForCausalLM", rope=_rope),
    _family(model_type="mistral", hf_class="MistralForCausalLM", rope=default_rope),
)
