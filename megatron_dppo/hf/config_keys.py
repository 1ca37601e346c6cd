"""Keys of config.json: each is one that the model is built from, one that cannot change it, or an error."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families import FAMILIES
from megatron_dppo.types.model_folder import HfConfig

_ROPE = ("rope_parameters", "rope_scaling")
"""Dictionaries of the rotary embedding in transformers 5 and 4."""
_ROPE_NUMBERS = ("rope_theta", "partial_rotary_factor")
"""Parameters of the rotary embedding that transformers 4 has beside the dictionary."""
_ROPE_KEYS = {
    *("rope_type", "type", *_ROPE_NUMBERS, "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor"),
    # Sections of positions for images; text has the same position in each.
    *("mrope_section", "mrope_interleaved"),
}
_CHECKED = {
    *("attention_bias", "head_dim", "is_causal", "layer_types", "mlp_bias", "quantization_config"),
    *("use_sliding_window", *_ROPE, *_ROPE_NUMBERS),
}
"""Keys that the ``shape``, ``fields`` or ``rope`` of every family looks at."""
_WITHOUT_EFFECT = {
    # Names, and who wrote the file.
    *("model_type", "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "auto_map", "torch_dtype"),
    "tokenizer_class",
    *("unsloth_fixed", "unsloth_version", "transformers.js_config", "is_llama_config"),
    # Which kernels compute the model, and how many tokens a server accepts.
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled"),
    *("_experts_implementation", "experts_implementation", "model_max_length", "max_sequence_length"),
    *("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "gradient_checkpointing"),
    # The layers from which ``use_sliding_window`` counts, which must be false.
    "max_window_layers",
    # Losses and layouts of the pre-training.
    *("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef", "output_router_logits", "pretraining_tp"),
    # What transformers 4 wrote of every model, and no causal language model reads.
    *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "num_labels"),
    *("output_attentions", "prefix", "pruned_heads", "task_specific_params"),
    *("tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_bfloat16"),
}
_IDS = ("_token_id", "_token_ids")
"""Ends of keys that name tokens, such as ``unk_token_id``. A language model computes the same with each."""
_MOST_LAYERS = 1024
"""Largest number of layers that is read. Published models have at most 126, and 512 experts for each."""
_MOST_EXPERTS = 1 << 17
"""Largest number of experts in all layers. Published models have at most 30,720."""
_COUNTED = ("layer", "expert", "dense_replace", "depth", "num_labels")
"""Parts of the keys that count layers, experts or labels, of which transformers makes lists."""


def check_counts(values: Mapping[str, object]) -> None:
    """Check the numbers of layers and experts in config.json, before transformers makes a list or a module of each."""
    counts = {
        key: value
        for key, value in values.items()
        if any(part in key for part in _COUNTED) and type(value) is int and "size" not in key
    }
    for key, value in counts.items():
        if value > (most := _MOST_LAYERS * (16 if "expert" in key else 1)):
            raise CheckpointError(
                f"config.json has {key} = {value}. Expected at most {most}. Fix: copy the file again from the model"
            )
    layers = max((value for key, value in counts.items() if "layer" in key), default=1)
    experts = max((value for key, value in counts.items() if "expert" in key), default=1)
    if layers * experts > _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json has {layers} layers of {experts} experts. Expected at most {_MOST_EXPERTS} experts in all. "
            "Fix: copy the file again from the model"
        )
    for nested in values.values():
        if isinstance(nested, Mapping):
            check_counts(nested)


def check_config_keys(values: Mapping[str, object], hf_config: HfConfig, file: Path) -> None:
    """Check that every key of config.json is known, and that two spellings of a key agree.

    transformers ignores a key that its class does not have, and servers may compute with it. null is a key that is not
    set. ``values`` may be those of the language model in the file. A model without a family here is not checked.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        return
    contradiction = next(_contradictions(values, hf_config), None)
    if contradiction is not None:
        raise CheckpointError(
            f"{file} says {contradiction}. Expected one value: transformers and servers read different ones. "
            "Fix: remove the wrong one"
        )
    known = {field.name for field in fields(hf_config)} | _CHECKED | _WITHOUT_EFFECT | set(family.other_keys)
    known |= _generation_keys().union(*type(hf_config).attribute_map.items())
    unknown = {key: value for key, value in values.items() if key not in known and not key.endswith(_IDS)}
    for name in _ROPE:
        unknown |= {f"{name}.{key}": value for key, value in _dict(values, name).items() if key not in _ROPE_KEYS}
    listed = ", ".join(f"{key} = {value!r}" for key, value in unknown.items() if value is not None)
    if listed:
        raise CheckpointError(
            f"{file} has keys that no {family.model_type} model is known to have: {listed}. Training would ignore "
            "them, and a server may compute with them. Fix: remove them from the file if they do not change the model"
        )


def _generation_keys() -> set[str]:
    from transformers import GenerationConfig

    # Defaults of generation, which transformers 4 wrote into config.json. Runs sample with ``rollout``.
    return set(vars(GenerationConfig()))


def _dict(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def _contradictions(values: Mapping[str, object], hf_config: HfConfig) -> Iterator[str]:
    """Yield each pair of spellings with different values."""
    both = [(name, _dict(values, name)) for name in _ROPE]
    if all(rope for _, rope in both) and both[0][1] != both[1][1]:
        yield " and ".join(f"{name} = {rope!r}" for name, rope in both)
    pairs = [((name, values), (alias, values)) for alias, name in type(hf_config).attribute_map.items()]
    for _, rope in both:
        pairs += [((key, values), (key, rope)) for key in _ROPE_NUMBERS]
        pairs.append((("type", rope), ("rope_type", rope)))
    for (first, source), (second, other) in pairs:
        a, b = source.get(first), other.get(second)
        if a is not None and b is not None and a != b:
            where = "" if other is values else " of the rotary embedding"
            yield f"{first} = {a!r} and {second}{where} = {b!r}"
