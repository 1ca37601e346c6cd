"""Checks of the inference servers and of the model that they serve, before the first step."""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.command import read_api_key
from megatron_dppo.engines.serving.environment import TRANSFER_VARIABLES, shares_communicator, transfer_variables
from megatron_dppo.errors import ConfigError, ServerError, UserError
from megatron_dppo.export.quantization import BLOCK, GROUP, Format, Quantization, find_quantized_names
from megatron_dppo.hf.folder import configured_end_tokens, model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.network import is_loopback, source_address
from megatron_dppo.setup.inputs import Inputs
from megatron_dppo.weights.sharing import is_local
from megatron_dppo_engines.serving.checks import ServerRequirements, find_server_problems
from megatron_dppo_engines.serving.collectives import CollectiveVersions

_SECONDS = 10.0
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class ServerCheckResult:
    """Result of checking the servers."""

    problems: list[UserError]
    usable: bool
    """True if at least one server has no problem."""


def find_stopped(urls: Sequence[str]) -> list[str]:
    """Return the servers that nobody listens for, in order. One that accepts a connection is not among them."""

    def is_stopped(url: str) -> bool:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(max_workers=32) as pool:
        return [url for url, stopped in zip(urls, pool.map(is_stopped, urls), strict=True) if stopped]


def check_servers(
    config: Config, inputs: Inputs | None, *, generating: bool, skipped: Collection[str] = ()
) -> ServerCheckResult:
    """Check every inference server against the requirements of the run, but for those in ``skipped``.

    With ``generating`` it also sends a generation request. The local engine has no problems.
    """
    if config.rollout.engine == "local":
        return ServerCheckResult([], usable=True)
    requirements = required_server_features(config, inputs)
    urls = [url for url in config.rollout.servers.resolved_urls if url not in skipped]
    if not urls:
        return ServerCheckResult([], usable=False)
    key = read_api_key(config.rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")

    def check(url: str) -> Sequence[UserError]:
        try:
            problems = find_server_problems(url, requirements, key, timeout=_SECONDS, must_generate=generating)
            return [ServerError(url, problem) for problem in problems]
        except UserError as error:
            return [error]

    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        by_server = list(pool.map(check, urls))
    return ServerCheckResult(
        problems=[error for errors in by_server for error in errors],
        usable=any(not errors for errors in by_server),
    )


def find_sync_host_problem(rollout: RolloutConfig) -> str | None:
    """Return why servers cannot reach rank 0 at ``rollout.weight_sync.host``, as ``distributed`` needs; or None."""
    if not shares_communicator(rollout):
        return None
    host = rollout.weight_sync.host
    remote = [url for url in rollout.servers.resolved_urls if not is_local(url)]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"rollout.weight_sync.host = {host!r} is no address or known name ({error}){_sync_host_fix(remote)}"
    # The group listens at the first one.
    address = str(infos[0][4][0])
    if remote and is_loopback(address):
        resolved = "is" if address == host else f"resolves to {address}, which is"
        return (
            f"rollout.weight_sync.host = {host!r} {resolved} a loopback address, and {remote[0]} is on another machine"
            f"{_sync_host_fix(remote)}"
        )
    return None


def _sync_host_fix(remote: Sequence[str]) -> str:
    sources = (source_address(urlsplit(url).hostname or "") for url in remote)
    usable = next((source for source in sources if not is_loopback(source)), None)
    example = f", such as {usable}, which is on the route there" if usable else ""
    return f". Set it to an address of rank 0's machine that the servers reach{example}"


def required_server_features(config: Config, inputs: Inputs | None) -> ServerRequirements:
    """Return what the run requires of its servers. Without ``inputs`` it assumes the longest allowed prompt."""
    assert config.rollout.engine != "local"
    max_tokens = {"train": config.rollout.max_new_tokens, "eval": config.eval_max_new_tokens if config.data.eval else 0}
    if inputs is None:
        context = config.data.max_prompt_tokens + max(max_tokens.values())
    else:
        held_out = [prompts.longest + max_tokens["eval"] for prompts in inputs.eval_prompts.values()]
        context = max(inputs.train_prompts.longest + max_tokens["train"], *held_out, 0)
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
        trainer=trainer_versions(config.rollout),
        command=tuple(config.rollout.servers.command),
    )


def trainer_versions(rollout: RolloutConfig) -> CollectiveVersions | None:
    """Return the versions that servers must share with this process; None if they join no NCCL communicator of it."""
    if not shares_communicator(rollout) or not torch.cuda.is_available():
        return None
    nccl = torch.cuda.nccl.version()
    environ = os.environ | transfer_variables(rollout, os.environ)
    return CollectiveVersions(
        torch=torch.__version__,
        nccl=".".join(map(str, nccl[:3])),
        variables={name: environ[name] for name in TRANSFER_VARIABLES},
    )


_SUPPORTED = (
    f"supported are 'fp8' in blocks of {BLOCK} x {BLOCK} and 'compressed-tensors' INT4 in groups of {GROUP} "
    "(pack-quantized), whose scales depend on the weights alone; megatron-dppo convert quantize writes both"
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
"""Supported values of each key. None: the key may be missing."""

_COMPARED_KEYS = ("vocab_size", "hidden_size", "tie_word_embeddings", "architectures")


def served_quantization(rollout: RolloutConfig) -> Quantization | None:
    """Return the quantization of ``rollout.servers.model``. None if the servers have the model's own weights."""
    path = rollout.servers.model
    if path is None:
        return None
    folder = Path(path)
    name = f"rollout.servers.model = {path!r}"
    settings = getattr(read_hf_config(path, "rollout.servers.model"), "quantization_config", None)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{name} is not quantized: its config.json has no quantization_config. Remove the key (servers then "
            "start with model.path), or make a quantized folder with megatron-dppo convert quantize"
        )
    weight_format = _read_format(settings, name)
    quantized_names = find_quantized_names(FolderWeights(folder, "rollout.servers.model").names(), weight_format)
    if not quantized_names:
        raise ConfigError(f"{name}: its config.json has the format {weight_format}, but no weight has this format")
    return Quantization(weight_format, quantized_names)


def check_served_model(rollout: RolloutConfig, model: ModelConfig) -> None:
    """Check that ``rollout.servers.model`` is a copy of the model in a supported quantization."""
    path = rollout.servers.model
    if served_quantization(rollout) is None or path is None:
        return
    trained = read_hf_config(model.path)
    served = read_hf_config(path, "rollout.servers.model")
    del served.quantization_config  # model_shape rejects quantized models, which cannot be trained
    differences = [
        f"{key} {getattr(trained, key, None)!r}, {getattr(served, key, None)!r}"
        for key in _COMPARED_KEYS
        if getattr(trained, key, None) != getattr(served, key, None)
    ]
    ends = [sorted(configured_end_tokens(each)) for each in (trained, served)]
    if ends[0] != ends[1]:
        differences.append(f"eos_token_id {ends[0]}, {ends[1]}")
    if differences or model_shape(trained) != model_shape(served):
        raise ConfigError(
            f"rollout.servers.model = {path!r} is another model than model.path = {model.path!r} "
            f"({', '.join(differences) or 'their layers or experts differ'}); make a quantized copy of model.path "
            "with megatron-dppo convert quantize"
        )


def _read_format(settings: Mapping[str, Any], name: str) -> Format:
    method = settings.get("quant_method")
    if method == "fp8":
        _require(settings, _FP8, name)
        return "fp8"
    if method == "compressed-tensors":
        _require(settings, {"format": ("pack-quantized",), "kv_cache_scheme": (None,)}, name)
        for group in settings.get("config_groups", {}).values():
            _require(group, {"input_activations": (None,), "output_activations": (None,)}, name)
            _require(group.get("weights") or {}, _INT4, name)
        return "int4"
    raise ConfigError(f"{name} has quant_method = {method!r}; {_SUPPORTED}")


def _require(settings: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], name: str) -> None:
    for key, values in supported.items():
        if settings.get(key) not in values:
            raise ConfigError(f"{name} has {key} = {settings.get(key)!r} in its quantization_config; {_SUPPORTED}")
