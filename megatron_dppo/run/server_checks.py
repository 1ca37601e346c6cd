"""Checks of the inference servers and of the model that they serve, before the first step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.checks import ServerRequirements, find_server_problems
from megatron_dppo.engines.serving.command import read_api_key
from megatron_dppo.errors import ConfigError, ServerError, UserError
from megatron_dppo.hf.folder import model_shape, read_hf_config
from megatron_dppo.run.inputs import Inputs
from megatron_dppo.weights.quantization import BLOCK, GROUP, Format, Quantization, find_quantized_names

_SECONDS = 10.0


@dataclass(frozen=True)
class ServerCheckResult:
    """Result of checking the servers."""

    problems: list[UserError]
    usable: bool
    """True if at least one server has no problem."""


def check_servers(config: Config, inputs: Inputs | None, *, generating: bool) -> ServerCheckResult:
    """Ask each server what it is, and whether it is ``generating``; no servers, no problems."""
    if config.rollout.engine == "local":
        return ServerCheckResult([], usable=True)
    needs, urls = required_server_features(config, inputs), config.rollout.servers.resolved_urls
    key = read_api_key(config.rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")

    def ask(url: str) -> Sequence[UserError]:
        try:
            found = find_server_problems(url, needs, key, timeout=_SECONDS, must_generate=generating)
            return [ServerError(url, problem) for problem in found]
        except UserError as error:
            return [error]

    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        found = list(pool.map(ask, urls))
    return ServerCheckResult(
        [error for errors in found for error in errors], usable=any(not errors for errors in found)
    )


def required_server_features(config: Config, inputs: Inputs | None) -> ServerRequirements:
    """Return what the run requires of its servers. Without ``inputs`` it assumes the longest allowed prompt."""
    assert config.rollout.engine != "local"
    answers = {"train": config.rollout.max_new_tokens, "eval": config.eval_max_new_tokens if config.data.eval else 0}
    if inputs is None:
        context = config.data.max_prompt_tokens + max(answers.values())
    else:
        held_out = [prompts.longest + answers["eval"] for prompts in inputs.eval_prompts.values()]
        context = max(inputs.train_prompts.longest + answers["train"], *held_out, 0)
    return ServerRequirements(
        engine=config.rollout.engine,
        context=context,
        topk=config.topk_logprobs,
        routed_experts=config.train.needs_engine_routing,
        weight_sync=config.rollout.weight_sync.method,
        adapter_rank=config.lora.rank if config.rollout.weight_sync.method == "adapter" else 0,
        quantized=config.rollout.servers.model is not None,
        colocated=config.rollout.servers.colocated,
        sampling_mask_ids=config.rollout.top_k if config.rollout.has_filters else 0,
    )


_TAKEN = (
    f"taken are 'fp8' in blocks of {BLOCK} x {BLOCK} and 'compressed-tensors' INT4 in groups of {GROUP} "
    "(pack-quantized), whose scales follow from the weights alone; megatron-dppo convert quantize writes both"
)


_FP8 = {
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic",),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float"),
}


_INT4 = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": (GROUP,),
    "symmetric": (True,),
    "dynamic": (None, False),
    "actorder": (None,),
}
"""Keys and the values that are taken; None = left out."""


_SIZES = ("vocab_size", "hidden_size", "tie_word_embeddings", "architectures")


def served_quantization(config: Config) -> Quantization | None:
    """Return the quantization of ``rollout.servers.model``. None if the servers have the model's own weights.

    Raises:
        ConfigError: no folder, not quantised, or in a form that no new weights can be brought into.
    """
    path = config.rollout.servers.model
    if path is None:
        return None
    folder, what = Path(path), f"rollout.servers.model = {path!r}"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{what} is not a Hugging Face folder: {folder / 'config.json'} is missing")
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{what} is not quantised: its config.json has no quantization_config. Remove it (servers then start with "
            "model.path), or make a quantised folder with megatron-dppo convert quantize"
        )
    form = _form(settings, what)
    names = find_quantized_names(_names(folder, what), form)
    if not names:
        raise ConfigError(f"{what}: config.json says {form}, and none of its weights is so")
    return Quantization(form, names)


def check_served_model(config: Config) -> None:
    """Check that ``rollout.servers.model`` is a copy of the model in a supported quantization.

    Raises:
        ConfigError: it is not.
    """
    path = config.rollout.servers.model
    if served_quantization(config) is None or path is None:
        return
    mine, served = read_hf_config(config.model.path), read_hf_config(path)
    del served.quantization_config  # with it it would be no model that can be trained
    differing = [name for name in _SIZES if getattr(mine, name, None) != getattr(served, name, None)]
    if differing or model_shape(mine) != model_shape(served):
        told = ", ".join(f"{name} {getattr(mine, name, None)!r}, {getattr(served, name, None)!r}" for name in differing)
        raise ConfigError(
            f"rollout.servers.model = {path!r} is another model than model.path = {config.model.path!r} "
            f"({told or 'their layers or experts differ'}); make a quantised copy of it with "
            "megatron-dppo convert quantize"
        )


def _form(settings: Mapping[str, Any], what: str) -> Format:
    method = settings.get("quant_method")
    if method == "fp8":
        _require(settings, _FP8, what)
        return "fp8"
    if method == "compressed-tensors":
        _require(settings, {"format": ("pack-quantized",), "kv_cache_scheme": (None,)}, what)
        for group in settings.get("config_groups", {}).values():
            _require(group, {"input_activations": (None,), "output_activations": (None,)}, what)
            _require(group.get("weights") or {}, _INT4, what)
        return "int4"
    raise ConfigError(f"{what} has quant_method = {method!r}; {_TAKEN}")


def _require(settings: Mapping[str, Any], taken: Mapping[str, tuple[Any, ...]], what: str) -> None:
    for key, values in taken.items():
        if settings.get(key) not in values:
            raise ConfigError(f"{what} has {key} = {settings.get(key)!r} in its quantization_config; {_TAKEN}")


def _names(folder: Path, what: str) -> set[str]:
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except SafetensorError as error:
            raise ConfigError(f"{what}: {file} is not a readable safetensors file: {error}") from error
    return names
