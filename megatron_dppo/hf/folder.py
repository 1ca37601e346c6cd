"""Hugging Face folders: configuration, and weights by the names in the files.

A *stream of weights* is an iterable of ``(name, tensor)`` with full tensors by on-disk name, one per expert. The names
in memory differ between versions of transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import check_model_folder, require_regular_files
from megatron_dppo.hf.config_keys import check_config_keys, check_counts
from megatron_dppo.hf.families import ALIASES, FAMILIES, get_family
from megatron_dppo.hf.families.family import check_sizes
from megatron_dppo.hf.families.rules import OUTPUT, rename
from megatron_dppo.hf.weight_files import DTYPES, FolderWeights, check_tied_output
from megatron_dppo.types import RoutingShape
from megatron_dppo.types.model_folder import HfConfig, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WeightStream = Iterable[tuple[str, Tensor]]
Weights = Iterator[tuple[str, Tensor]]
_MOST_CHARACTERS = 4 << 20
"""Largest size of a config.json. Those of published models have less than 1 MB, and transformers takes seconds for each
MB of lists."""
_ROUTER_BIAS = "e_score_correction_bias"
_DECAY = ".linear_attn.A_log"
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_FP32_SUFFIXES = (_ROUTER_BIAS, _DECAY, ".weight_scale_inv")


def read_hf_config(path: str | Path, key: str = "model.path") -> HfConfig:
    """Return the transformers configuration of a folder, with the end tokens of generation_config.json too."""
    folder = Path(path)
    check_model_folder(path, key)
    require_regular_files(folder)
    try:
        hf_config = _load_config(folder)
    except CheckpointError:
        raise
    # transformers and huggingface_hub raise many kinds of errors.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be read by transformers: {reason}. Copy the folder again; a new model "
            "needs a newer transformers"
        ) from error
    if is_mxfp4(hf_config) and get_family(hf_config).fused_experts.is_interleaved:
        # ``FolderWeights`` reads such experts as bf16, so this is the configuration of an unquantized model.
        del hf_config.quantization_config
    _add_generation_end_tokens(folder, hf_config)
    return hf_config


def _load_config(folder: Path) -> HfConfig:
    from transformers import AutoConfig

    text = (folder / "config.json").read_text(encoding="utf-8")
    if len(text) > _MOST_CHARACTERS:
        raise CheckpointError(
            f"{folder / 'config.json'} has {len(text)} characters. Expected at most {_MOST_CHARACTERS}. Fix: copy the "
            "file again from the model"
        )
    values = json.loads(text)
    check_counts(values)
    alias = ALIASES.get(values.get("model_type"))
    _check_tied(values)
    if alias is None:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        hf_config = _language_model(loaded)
        if hf_config is not loaded:
            values = values.get("text_config") or {}
    else:
        # Such a folder names its class by ``auto_map``: Python code that came with it, which is never run.
        keys = {key: value for key, value in deepcopy(values).items() if key != "auto_map"}
        hf_config = AutoConfig.for_model(**keys | {"model_type": alias})
    check_config_keys(values, hf_config, folder / "config.json")
    return hf_config


def _check_tied(values: Mapping[str, object]) -> None:
    """Check that a nested language model is tied if the model around it is: readers take one or the other key."""
    nested = values.get("text_config")
    key = "tie_word_embeddings"
    if isinstance(nested, dict) and key in nested and nested[key] != values.get(key, nested[key]):
        raise CheckpointError(f"Expected text_config.{key} = {values[key]} as {key}, got {nested[key]}. Fix: set both.")


def _language_model(hf_config: HfConfig) -> HfConfig:
    """Return the configuration of the language model, which is nested in that of a model for images."""
    text_config = getattr(hf_config, "text_config", None)
    if text_config is None or text_config.model_type not in FAMILIES:
        return hf_config
    text_config.tie_word_embeddings = hf_config.tie_word_embeddings
    for key in ("quantization_config", "eos_token_id"):
        value = getattr(hf_config, key, None)
        if value is not None and getattr(text_config, key, None) is None:
            setattr(text_config, key, value)
    return text_config


def with_served_keys(values: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a config.json with the keys that servers need and transformers does not write."""
    model_type = str(values.get("model_type", ""))
    family = FAMILIES.get(ALIASES.get(model_type, model_type))
    return {**({} if family is None else family.served_keys(values)), **values}


def is_mxfp4(hf_config: HfConfig) -> bool:
    """Return True if a configuration says that the experts are quantized to MXFP4, as released gpt-oss models are."""
    quantization = getattr(hf_config, "quantization_config", None)
    return (
        hf_config.model_type in FAMILIES
        and isinstance(quantization, Mapping)
        and quantization.get("quant_method") == "mxfp4"
    )


def is_nested_config(path: str | Path) -> bool:
    """Return True if a folder's config.json holds the language model beside other models."""
    nested = _config_values(path).get("text_config")
    return isinstance(nested, dict) and nested.get("model_type") in FAMILIES


def num_joined_experts(path: str | Path) -> int | None:
    """Return the number of experts that a folder's files must hold in one tensor each. None: one weight an expert."""
    values = _config_values(path)
    family = FAMILIES.get(str(values.get("model_type")))
    is_joined = family is not None and family.fused_experts.is_interleaved
    return int(values["num_local_experts"]) if is_joined else None


def _config_values(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return values


def _add_generation_end_tokens(folder: Path, hf_config: HfConfig) -> None:
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {error}. Copy the file again, or delete it"
        ) from error
    configured = _token_ids(hf_config.eos_token_id, folder / "config.json", hf_config)
    tokens = list(dict.fromkeys([*configured, *_token_ids(listed, file, hf_config)]))
    if tokens != configured:
        hf_config.eos_token_id = tokens


def _token_ids(value: Any, file: Path, hf_config: HfConfig) -> list[int]:
    """Return the tokens of an ``eos_token_id``: a token, a list of them, or null."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    vocab_size = getattr(hf_config, "vocab_size", math.inf)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(f"{file} has eos_token_id = {value!r}; expected tokens from 0 to {vocab_size - 1}")
    return tokens


def model_shape(hf_config: HfConfig) -> ModelShape:
    """Return the sizes of a model."""
    family = get_family(hf_config)
    check_sizes(hf_config)
    try:
        return family.shape(hf_config)
    # A key that is missing, or of a type that no model has.
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"config.json of model_type {family.model_type!r} cannot be used: {type(error).__name__}: {error}. "
            "Compare its keys with those of a released model of that type"
        ) from error


def routing_shape(hf_config: HfConfig, *, weights: bool = False) -> RoutingShape | None:
    """Return the sizes of an MoE model's routes, with or without combine weights. None for a dense model."""
    shape = model_shape(hf_config)
    if shape.num_experts is None:
        return None
    return RoutingShape(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        topk=hf_config.num_experts_per_tok,
        dense_layers=frozenset(shape.dense_layers),
        weights=weights,
        has_sigmoid=shape.has_router_bias,
        # A family without the key always normalizes.
        weights_add_to_one=getattr(hf_config, "norm_topk_prob", True),
        weights_scale=getattr(hf_config, "routed_scaling_factor", 1.0),
    )


def end_tokens(hf_config: HfConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a response: those of the tokenizer, and of a configuration of ``read_hf_config``."""
    return configured_end_tokens(hf_config) | {tokenizer.eos_token_id}


def configured_end_tokens(hf_config: HfConfig) -> frozenset[int]:
    """Return the end tokens of a configuration of ``read_hf_config``, without the tokenizer's."""
    configured = hf_config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in tokens if token is not None)


def preload_models() -> None:
    """Import the Qwen3-MoE module before processes are forked; the import takes seconds in each of them."""
    import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")


def build_hf_model(hf_config: HfConfig, dtype: torch.dtype, seed: int | None = None) -> PreTrainedModel:
    """Return a transformers causal language model with random weights. ``seed`` makes them reproducible.

    The norms of latents have the configuration's ``rms_norm_eps``, as in Megatron, SGLang and vLLM. transformers always
    gives them 1e-6.
    """
    from transformers import AutoModelForCausalLM

    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=False).eval()
    for name, module in model.named_modules():
        if name.endswith(_LATENT_NORMS):
            module.variance_epsilon = hf_config.rms_norm_eps
    # from_config converts router biases to ``dtype``; from_pretrained keeps them in fp32. It rounds decays of linear
    # attention, servers do not.
    if dtype.itemsize < 4:
        decays = [parameter for name, parameter in model.named_parameters() if name.endswith(_DECAY)]
        for tensor in (*router_biases(model).values(), *decays):
            tensor.data = tensor.data.float()
    return model


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is stored: the model's; fp32 for router biases, decays and FP8's scales."""
    return torch.float32 if name.endswith(_FP32_SUFFIXES) else dtype


def stream_model(model: PreTrainedModel) -> Weights:
    """Stream the weights of a transformers model by on-disk name, one for each expert, without tied output weights."""
    family = get_family(model.config)
    tied = bool(model.config.tie_word_embeddings)
    for stored_name, stored in model.state_dict().items():
        if tied and stored_name == OUTPUT.hf[0]:
            continue
        for name, tensor in family.fused_experts.split(stored_name, stored):
            yield rename(name, family.disk_names), tensor


def weight_shapes(hf_config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, by its name on disk; nothing is allocated."""
    try:
        with torch.device("meta"):
            model = build_hf_model(hf_config, torch.float32)
    # transformers raises what its layers raise for sizes that do not fit together.
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot build the model of config.json: {type(error).__name__}: {error}. "
            "Its sizes must fit together"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in stream_model(model)}


def adapter_sizes(shapes: Mapping[str, Sequence[int]], lora: LoraConfig) -> dict[str, int]:
    """Return the number of adapter parameters (A and B) of each adapted weight, by on-disk name."""
    matrices = {name: shape for name, shape in shapes.items() if name.endswith(".weight")}
    return {n: lora.rank * sum(shape) for n, shape in matrices.items() if n.split(".")[-2] in lora.target_modules}


@torch.no_grad()
def copy_into_model(model: PreTrainedModel, weights: WeightStream) -> None:
    """Copy a stream of weights into a transformers model, in its dtype."""
    targets = {**dict(model.named_parameters()), **router_biases(model)}
    # Elements and not names: experts arrive one by one in a tensor that holds all of them.
    elements_left = {name: parameter.numel() for name, parameter in targets.items()}
    family = get_family(model.config)
    usual_names = [(disk, usual) for usual, disk in family.disk_names]
    for disk_name, tensor in weights:
        name = rename(disk_name, usual_names)
        match = (targets[name], name) if name in targets else family.fused_experts.find(targets, name)
        if match is None:
            raise CheckpointError(f"weight {name} does not belong to this model")
        target, key = match
        if target.shape != tensor.shape:
            raise CheckpointError(f"weight {name} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
        target.copy_(tensor)
        elements_left[key] -= target.numel()
    missing = sorted(key for key, left in elements_left.items() if left)
    if missing:
        raise CheckpointError(f"Missing weights: {missing[:5]} ({len(missing)} parameters in all).")


def router_biases(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the router biases of a transformers model by name; they are buffers, not parameters."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(_ROUTER_BIAS)}


def drain(weights: WeightStream) -> None:
    """Run a stream to its end, on ranks that take part in its collectives without using the weights."""
    for _ in weights:
        pass


class DictWeights(dict[str, Tensor]):
    """Weights in memory, with random access by name."""

    def names(self) -> set[str]:
        """Return all names."""
        return set(self)


def is_mtp_weight(name: str, shape: ModelShape) -> bool:
    """Return True for a weight of a multi-token-prediction layer, which follows the last layer and is not loaded."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - shape.num_layers < shape.num_mtp_layers


def stream_folder(path: str | Path, hf_config: HfConfig, key: str = "model.path") -> Weights:
    """Check that a folder's weights fit its config.json, and return a stream of those that the model has."""
    check_weights_fit(path, hf_config, key)
    shape = model_shape(hf_config)
    weights = FolderWeights(path, key).stream(tied=hf_config.tie_word_embeddings)
    return ((name, tensor) for name, tensor in weights if not is_mtp_weight(name, shape))


def parameter_count(hf_config: HfConfig) -> int:
    """Return the number of weights; tied ones count once."""
    return sum(torch.Size(shape).numel() for shape in weight_shapes(hf_config).values())


def check_weights_fit(path: str | Path, hf_config: HfConfig, key: str = "model.path") -> None:
    """Check that a folder's safetensors files are complete and match its config.json."""
    weights = FolderWeights(path, key)
    shape, expected = model_shape(hf_config), weight_shapes(hf_config)
    # A tied model may store its output layer as well; it is compared with the embedding below.
    tied = {OUTPUT.hf[0]} if hf_config.tie_word_embeddings else set()
    names = {name for name in weights.names() - tied if not is_mtp_weight(name, shape)}
    missing = [name for name in expected if name not in names]
    unexpected = sorted(names - expected.keys())
    stored = {name: weights.describe(name) for name in expected if name in names}
    other = [name for name, (size, dtype) in stored.items() if size != expected[name] or dtype not in DTYPES]
    if missing or other or unexpected:
        name = (missing or other or unexpected)[0]
        if missing:
            detail = "is missing"
        elif other:
            size, dtype = stored[name]
            detail = f"has shape {size} in {dtype}, expected {expected[name]} in {', '.join(DTYPES)}"
        else:
            detail = "does not belong to the model"
        raise CheckpointError(
            f"{key} = {str(path)!r}: the weights do not fit config.json: {name} {detail} ({len(missing)} missing, "
            f"{len(other)} of other shapes or dtypes, {len(unexpected)} unexpected). "
            "Use the config.json and the weights of one model"
        )
    if tied:
        check_tied_output(weights)
