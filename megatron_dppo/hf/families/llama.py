"""Llama 2 and 3, and Mistral."""

from functools import partial

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    Rope,
    common_shape,
    default_rope,
    grouped_fields,
    raise_unsupported,
    require_full_rotation,
    require_values,
    rope_number,
    rope_parameters,
    window_layers,
)
from megatron_dppo.types.model_folder import HfConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that Megatron's Llama 3 scaling fixes; all released Llama 3 models have them."""


def _shape(hf_config: HfConfig) -> ModelShape:
    # SmolLM2 has ``rope_interleaved``, which transformers does not read.
    require_values(hf_config, attention_bias=False, sliding_window=None, rope_interleaved=False)
    return common_shape(hf_config)


def _mistral_shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, attention_bias=False, layer_types=None)
    return common_shape(hf_config, window_layers=window_layers(hf_config))


def _rope(hf_config: HfConfig) -> Rope:
    parameters = rope_parameters(hf_config, "default", "llama3")
    if parameters["rope_type"] == "default":
        return default_rope(hf_config)
    require_full_rotation(hf_config, parameters)
    for key, value in _LLAMA3.items():
        if (stored := parameters.get(key)) != value:
            raise_unsupported(hf_config, f"rope_parameters.{key}", stored, f"{value!r} (fixed in Megatron)")
    return Rope(parameters["rope_theta"], llama3_factor=rope_number(hf_config, parameters, "factor"))


_family = partial(Family, fields=grouped_fields)
FAMILIES = (
    _family(
        model_type="llama",
        hf_class="LlamaForCausalLM",
        shape=_shape,
        rope=_rope,
        other_keys=("rope_interleaved", "sliding_window"),
        models="Llama 2, 3, 3.1, 3.2 (text)",
        features="Llama 3's scaling of the rotary embedding",
        # A head's slowest pair turns by 0.001 a token: scaling by 32 changes what a test of 16 tokens sees.
        tiny={
            "head_dim": 16,
            "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, "factor": 32.0, **_LLAMA3},
        },
        published=(
            Published(
                "Llama-3.1-8B", {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}, 8.03
            ),
        ),
        recipes=("smollm2/dppo.toml",),
    ),
    _family(
        model_type="mistral",
        hf_class="MistralForCausalLM",
        shape=_mistral_shape,
        models="Mistral 7B v0.1 to v0.3",
        features="a sliding window in every layer (v0.1)",
        tiny={"head_dim": 16, "sliding_window": None},
        variants={"mistral_window": {"head_dim": 16, "sliding_window": 5}},
        published=(Published("Mistral-7B-v0.3", {"vocab_size": 32768, "sliding_window": None}, 7.25),),
    ),
)
