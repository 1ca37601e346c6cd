"""The table ``model.transformer``: which fields of Megatron's TransformerConfig a user may set, and to what."""

import types
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer import TransformerConfig

from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.errors import ConfigError, ErrorCollector
from megatron_dppo.mcore.router_replay import check_router_replay_support

_OF_THE_MODEL = """
    num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size
    moe_ffn_hidden_size num_moe_experts moe_router_topk moe_router_pre_softmax gated_linear_unit
    activation_func add_bias_linear normalization layernorm_epsilon qk_layernorm add_qkv_bias
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_router_score_function
    moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    multi_latent_attention rotary_interleaved window_size window_attn_skip_freq softmax_type
"""
_OWNED = {
    "calculate_per_token_loss": "the loss is always divided by one global token count",
    "variable_seq_lengths": "it follows from the pipeline size",
    "moe_grouped_gemm": "the mapping of the weights depends on it",
    "moe_enable_routing_replay": "set train.router_replay",
    "moe_single_grouped_weight": "the weights of all experts then have one name, which the mapping does not know",
    "use_grouped_gemm_for_shared_expert": "the shared expert's weights then have names that the mapping does not know",
    "mla_down_proj_fusion": "the latents' weights then have names that the mapping does not know",
    **dict.fromkeys(
        ("fp8_param", "fp4", "fp4_param"),
        "quantised weights can neither be loaded from nor exported to the Hugging Face format here",
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "set model.dtype"),
    **dict.fromkeys(
        (*ParallelConfig.model_fields, "batch_p2p_comm"), "set it in [parallel], where the layout is checked"
    ),
    **dict.fromkeys(_OF_THE_MODEL.split(), "it is the model's own, from config.json"),
}
"""Fields of TransformerConfig that are not for the user's table, and why."""
_PLAIN = ("bool", "int", "float", "str", "dict", "list", "tuple")


def checked_overrides(overrides: dict[str, object], *, router_replay: bool) -> dict[str, object]:
    """``model.transformer``, if TransformerConfig has every key of it, with such values, and none is set elsewhere."""
    problems = ErrorCollector()
    if router_replay:
        problems.attempt(check_router_replay_support, overrides)
    known = {field.name for field in fields(TransformerConfig)}
    for key, value in overrides.items():
        if problem := _problem(key, value, known):
            problems.add(ConfigError(f"model.transformer.{key} = {value!r}: {problem}"))
    problems.raise_if_any()
    return overrides


def _problem(key: str, value: object, known: set[str]) -> str | None:
    if key in _OWNED:
        return _OWNED[key]
    if key not in known:
        close = get_close_matches(key, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"Megatron's TransformerConfig has no such field{hint}"
    hint = _hints().get(key, Any)
    return None if _fits(value, hint) else f"expected {_in_words(hint)}"


def _hints() -> dict[str, Any]:
    """Return the types of the fields; none where Megatron's annotations name what is not importable here."""
    try:
        return get_type_hints(TransformerConfig)
    except (NameError, TypeError):
        return {}


def _fits(value: object, hint: object) -> bool:
    """Return True if a TOML value has this type. False for types that TOML lacks (functions, enums)."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    plain = origin or hint
    if plain is bool:
        return isinstance(value, bool)
    if plain is int:
        # ``bool`` is a subclass of ``int``.
        return isinstance(value, int) and not isinstance(value, bool)
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if plain is str or plain is dict:
        return isinstance(value, plain)
    if plain in (list, tuple):
        return isinstance(value, list | tuple) and (not parts or all(_fits(v, parts[0]) for v in value))
    return plain is Any


def _in_words(hint: object) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(part) for part in parts if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    name = str(getattr(origin or hint, "__name__", hint))
    return name if name in _PLAIN else f"a {name}, which a configuration file cannot hold"
