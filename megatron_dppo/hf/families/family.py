"""Definition of a model family, and the parts that families share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.fused_experts import CHUNKED, FusedExperts
from megatron_dppo.hf.families.rules import DENSE_MLP, EXPERTS, Rule, grouped_attention
from megatron_dppo.types.model_folder import HfConfig


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, as arguments of Megatron's GPTModel."""

    theta: float
    percent: float = 1.0
    """Fraction of a head's dimensions that is rotated, from the first one."""
    llama3_factor: float | None = None
    """Factor of Llama 3's scaling. None disables scaling."""
    yarn: Mapping[str, object] | None = None
    """YaRN's parameters by Megatron's names, without ``yarn_``. Megatron reads them as attributes of its
    TransformerConfig, which has no such fields (0.16.1 to 0.19.2). None: no YaRN, or latent attention, whose
    configuration has the fields."""

    def arguments(self) -> dict[str, object]:
        """Return the arguments by the names of GPTModel."""
        kind = {"position_embedding_type": "rope" if self.yarn is None else "yarn"}
        scaling = (
            {} if self.llama3_factor is None else {"rope_scaling": True, "rope_scaling_factor": self.llama3_factor}
        )
        return {"rotary_base": self.theta, "rotary_percent": self.percent, **kind, **scaling}


@dataclass(frozen=True)
class Published:
    """A published model whose weight names and number of weights a test compares with config.json."""

    name: str
    keys: Mapping[str, object]
    """Keys of its config.json that differ from the defaults of the transformers class."""
    billions: float
    """Weights by the model's card, in billions."""
    stated: tuple[float, float] | None = None
    """Total and active weights as the authors round them, in billions. None for dense models."""


MegatronFields = dict[str, Any]
"""Fields of Megatron's ``TransformerConfig`` by name. Megatron declares their types."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one Hugging Face class: sizes, TransformerConfig fields, weight names, and what proves them."""

    model_type: str
    hf_class: str
    aliases: tuple[str, ...] = ()
    """Other ``model_type`` of config.json with the same keys and weights, which transformers does not know."""
    models: str
    """Models of the family, for docs/models.md."""
    features: str
    """Difference from Llama, for docs/models.md."""
    tiny: Mapping[str, object]
    """Keys of config.json of the tiny model of the parity tests, beyond sizes that all families share."""
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Keys of further tiny models, by the name of each."""
    published: tuple[Published, ...] = ()
    recipes: tuple[str, ...] = ()
    """Configuration files in ``examples`` that train a model of the family."""
    shape: Callable[[HfConfig], ModelShape]
    """Returns the sizes from config.json. Raises CheckpointError for unsupported features."""
    fields: Callable[[HfConfig, ModelShape], MegatronFields]
    """Returns the family's TransformerConfig fields, beyond those of every family."""
    rope: Callable[[HfConfig], Rope] = lambda hf_config: default_rope(hf_config)
    attention: Callable[[ModelShape], tuple[Rule, ...]] = grouped_attention
    dense: tuple[Rule, ...] = DENSE_MLP
    """Rules of the MLP in a layer without experts."""
    experts: tuple[Rule, ...] = EXPERTS
    """Rules of the MLP in a layer with experts."""
    disk_names: tuple[tuple[str, str], ...] = ()
    """Parts of weight names that differ on disk: ``(part in other families, part in this one)``."""
    fused_experts: FusedExperts = CHUNKED
    """Layout of the tensors that hold all experts of a layer in transformers."""
    linear: Callable[[ModelShape], tuple[Rule, ...]] = lambda shape: ()
    """Rules of linear attention, in the layers that have it instead of ``attention``."""
    other_keys: tuple[str, ...] = ()
    """Keys of published config.json files that the transformers class does not have. ``shape`` checks those that could
    change the model; any further key is refused."""
    served_keys: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda values: {}
    """Returns the keys with which SGLang and vLLM compute the family, from the keys of config.json.

    transformers does not write them. An exported config.json has them, and no other values go to servers.
    """


SLIDING = "sliding_attention"
"""Kind of a layer with a sliding window in ``layer_types``."""


def raise_unsupported(hf_config: HfConfig, key: str, value: object, supported: str) -> NoReturn:
    """Raise the CheckpointError of an unsupported value in config.json."""
    raise CheckpointError(
        f"config.json of model_type {hf_config.model_type!r} has {key} = {value!r}, which is not supported; "
        f"supported: {supported}"
    )


def require_values(hf_config: HfConfig, **expected: object) -> None:
    """Check that each key that config.json has holds the expected value, or one of a tuple of values."""
    for key, values in expected.items():
        allowed = values if isinstance(values, tuple) else (values,)
        # A missing key has the default of the model's class, which stands first.
        value = getattr(hf_config, key, allowed[0])
        if value not in allowed:
            raise_unsupported(hf_config, key, value, " or ".join(map(repr, allowed)))


def check_common_keys(hf_config: HfConfig, kinds: Sequence[str] = ("full_attention",)) -> None:
    """Check for quantized weights, other activations, biases in MLPs, and layers that are not of these ``kinds``."""
    if getattr(hf_config, "quantization_config", None) is not None:
        method = dict(hf_config.quantization_config).get("quant_method", "")
        raise_unsupported(
            hf_config, "quantization_config", method, "weights in bf16, fp16 or fp32 (convert the folder first)"
        )
    require_values(hf_config, hidden_act="silu", mlp_bias=(False, None), is_causal=True)
    if SLIDING not in kinds:
        require_values(hf_config, use_sliding_window=(False, None))
    unsupported = set(getattr(hf_config, "layer_types", None) or ()) - set(kinds)
    if unsupported:
        raise_unsupported(
            hf_config, "layer_types", sorted(unsupported), f"{' or '.join(map(repr, kinds))} in every layer"
        )


_SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"),
    *("vocab_size", "head_dim", "max_position_embeddings", "num_experts", "n_routed_experts", "n_shared_experts"),
    *("num_local_experts",),
    *("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim",),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group"),
)
_LARGEST_SIZE = 2**31 - 1


def check_sizes(hf_config: HfConfig) -> None:
    """Check that the sizes in config.json are positive numbers, and fit together where Megatron does not check it."""
    for key in _SIZES:
        _check_size(hf_config, key)
    eps = getattr(hf_config, "rms_norm_eps", 1e-6)
    if not isinstance(eps, float) or not 1e-12 <= eps <= 0.1:
        raise_unsupported(hf_config, "rms_norm_eps", eps, "a number from 1e-12 to 0.1")
    heads, groups = hf_config.num_attention_heads, getattr(hf_config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise_unsupported(hf_config, "num_key_value_heads", groups, f"a divisor of the {heads} attention heads")
    rotated = getattr(hf_config, "qk_rope_head_dim", None) or head_dim(hf_config)
    if rotated % 2:
        raise_unsupported(hf_config, "head_dim", rotated, "an even number, since pairs are rotated")


def _check_size(hf_config: HfConfig, key: str) -> None:
    value = getattr(hf_config, key, None)
    # By exact type, because True is an int.
    if value is not None and not (type(value) is int and 0 < value <= _LARGEST_SIZE):
        raise_unsupported(hf_config, key, value, f"a whole number from 1 to {_LARGEST_SIZE}")


def rope_parameters(hf_config: HfConfig, *kinds: str) -> Mapping[str, Any]:
    """Return the parameters of the rotary embedding, ``rope_theta`` included, if ``rope_type`` is one of ``kinds``.

    transformers 5 keeps them in ``rope_parameters``, transformers 4 in ``rope_scaling`` and ``rope_theta``.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in kinds:
        raise_unsupported(hf_config, "rope_type", kind, " or ".join(map(repr, kinds)))
    theta = {"rope_theta": parameters.get("rope_theta") or getattr(hf_config, "rope_theta", None)}
    return {**parameters, "rope_type": kind, "rope_theta": rope_number(hf_config, theta, "rope_theta")}


def rope_number(hf_config: HfConfig, parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive parameter of the rotary embedding; ``default`` also replaces null and 0, as in transformers."""
    value = parameters.get(key)
    if not value and default is not None:
        return default
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise_unsupported(hf_config, f"rope_parameters.{key}", value, "a positive number")
    return float(value)


def yarn_fields(hf_config: HfConfig, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of YaRN that its models share, by Megatron's names."""
    return dict(
        rotary_scaling_factor=rope_number(hf_config, parameters, "factor"),
        original_max_position_embeddings=int(rope_number(hf_config, parameters, "original_max_position_embeddings")),
        beta_fast=rope_number(hf_config, parameters, "beta_fast", 32.0),
        beta_slow=rope_number(hf_config, parameters, "beta_slow", 1.0),
    )


def default_rope(hf_config: HfConfig) -> Rope:
    """Return the rotary embedding of all dimensions of a head, without scaling."""
    parameters = rope_parameters(hf_config, "default")
    require_full_rotation(hf_config, parameters)
    return Rope(parameters["rope_theta"])


def require_full_rotation(hf_config: HfConfig, parameters: Mapping[str, Any]) -> None:
    """Check that the rotary embedding covers a whole head."""
    if (factor := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise_unsupported(hf_config, "partial_rotary_factor", factor, "1.0")


def partial_rope(hf_config: HfConfig) -> Rope:
    """Return the rotary embedding of the first dimensions of a head, without scaling."""
    parameters = rope_parameters(hf_config, "default")
    percent = rope_number(hf_config, {"partial_rotary_factor": 1.0, **parameters}, "partial_rotary_factor")
    if percent > 1.0:
        raise_unsupported(hf_config, "partial_rotary_factor", percent, "a number up to 1.0")
    return Rope(parameters["rope_theta"], percent=percent)


def common_shape(hf_config: HfConfig, kinds: Sequence[str] = ("full_attention",), **family_fields: Any) -> ModelShape:
    """Return the sizes that all families name alike in config.json, with ``family_fields`` of one family."""
    check_common_keys(hf_config, kinds)
    if family_fields.get("has_shared_expert"):
        # 0 in models without one.
        _check_size(hf_config, "shared_expert_intermediate_size")
    if (experts := family_fields.get("num_experts")) is not None and hf_config.num_experts_per_tok > experts:
        raise_unsupported(hf_config, "num_experts_per_tok", hf_config.num_experts_per_tok, f"at most {experts} experts")
    return ModelShape(
        family=hf_config.model_type,
        num_layers=hf_config.num_hidden_layers,
        num_attention_heads=hf_config.num_attention_heads,
        hidden_size=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        **{"num_query_groups": hf_config.num_key_value_heads, "num_experts": None} | family_fields,
    )


def head_dim(hf_config: HfConfig) -> int:
    """Return the head size of grouped attention."""
    size: int = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return size


def window_layers(hf_config: HfConfig) -> tuple[int, ...]:
    """Return the indices of the layers with a sliding window: those of ``layer_types``, or without the key, all."""
    count, window = hf_config.num_hidden_layers, getattr(hf_config, "sliding_window", None)
    default = ["full_attention" if window is None else SLIDING] * count
    kinds = getattr(hf_config, "layer_types", None) or default
    if len(kinds) != count:
        raise_unsupported(hf_config, "layer_types", kinds, f"one kind for each of the {count} layers")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if layers and not (type(window) is int and 0 < window <= _LARGEST_SIZE):
        raise_unsupported(hf_config, "sliding_window", window, "a number of tokens in a model with windows")
    return layers


def window_fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the TransformerConfig fields of sliding windows; {} for a model without."""
    if not shape.window_layers:
        return {}
    return dict(
        # Keys before and after the query's own. Hugging Face counts the query's own too.
        window_size=(hf_config.sliding_window - 1, 0),
        # 1 marks a layer with a window.
        window_attn_skip_freq=[int(i in shape.window_layers) for i in range(shape.num_layers)],
    )


def grouped_fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the TransformerConfig fields of grouped-query attention."""
    return dict(
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,
        **window_fields(hf_config, shape),
    )


def expert_fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the TransformerConfig fields of MoE layers; {} for a dense model."""
    if shape.num_experts is None:
        return {}
    # 1 marks a layer with experts, 0 a dense one.
    mixed = {"moe_layer_freq": [int(i not in shape.dense_layers) for i in range(shape.num_layers)]}
    return (mixed if shape.dense_layers else {}) | dict(
        # A family without dense layers has one size.
        moe_ffn_hidden_size=getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size,
        num_moe_experts=shape.num_experts,
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=True,
    )
