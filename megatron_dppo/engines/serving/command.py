"""Command line and environment of each inference server of a configuration."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config.model import LoraConfig, ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.engines.serving.environment import transfer_variables
from megatron_dppo.engines.serving.nodes import (
    ServerNode,
    answers_requests,
    count_nodes,
    headless_command,
    node_arguments,
)
from megatron_dppo.errors import ConfigError
from megatron_dppo_engines.serving import VLLM_EXTENSION
from megatron_dppo_engines.serving.server_process import ServerPlan

_MODULES = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_RESERVED_OPTIONS = {
    "host": "set rollout.servers.host",
    "port": "set rollout.servers.port",
    "api-key": "name an environment variable in rollout.servers.api_key_env: a key in a file is saved with the run",
    "admin-api-key": "name an environment variable in rollout.servers.admin_api_key_env",
    **dict.fromkeys(("node-rank", "dist-init-addr"), "nodes differ in it: pass it to `megatron-dppo serve` on each"),
    **dict.fromkeys(
        ("master-addr", "master-port", "headless"),
        "pass --node-rank and --dist-init-addr to `megatron-dppo serve` on each node, which sets it",
    ),
    **dict.fromkeys(
        ("disaggregation-mode", "kv-transfer-config"),
        "servers for prefill and for decoding answer only together, through a router, which passes on no weight "
        "updates, aborts, versions of the weights or routes of a prompt. Leave it out",
    ),
}
"""Options that an engine's section must not have, and what to set instead."""
_SIZE_OPTIONS = (
    ("tensor-parallel-size", "tp-size", "tp"),
    ("pipeline-parallel-size", "pp-size", "pp"),
    ("data-parallel-size", "dp-size", "dp"),
)
"""Names of the sizes whose product is the number of GPUs of one server."""
_MEMORY_RELEASE_OPTIONS: Mapping[str, dict[str, Any]] = {
    "sglang": {"enable-memory-saver": True},
    "vllm": {"enable-sleep-mode": True},
}
"""Options of a server that can release its memory."""
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Valid values of --max-lora-rank (vllm/config/lora.py, 0.32)."""


def plan_servers(
    rollout: RolloutConfig,
    options: dict[str, object],
    environ: Mapping[str, str],
    gpus: Sequence[str] = (),
    skip_gpus: int = 0,
    node: ServerNode | None = None,
) -> list[ServerPlan]:
    """Return one plan for each of ``rollout.servers.count`` servers on this machine.

    ``gpus`` are the devices that this process may use; none on a machine without GPUs. The first ``skip_gpus`` of them
    are left to the trainer; colocated servers use them too.
    """
    servers = rollout.servers
    if servers.colocated and gpus:  # without GPUs nothing can be released, and the engines reject the flags
        options = _MEMORY_RELEASE_OPTIONS[rollout.engine] | options
    node_options = node_arguments(rollout, options, node)
    gpus_by_server = _split_gpus(rollout, options, gpus, 0 if servers.colocated else skip_gpus)
    keys = _read_keys(rollout, environ)
    env = keys.env | _server_variables(rollout, environ)
    if keys.config_file and "config" in options:
        raise ConfigError(
            "[rollout.sglang] config: the API key is passed with --config, and SGLang accepts only one such file; "
            "write its content into [rollout.sglang], or leave rollout.servers.api_key_env out"
        )
    command = servers.command or [sys.executable, "-m", _MODULES[rollout.engine]]
    urls = servers.resolved_urls
    listens = answers_requests(rollout.engine, node)
    if node is not None and not listens:
        command = headless_command(command)
        urls = [f"http://{node.host}:{servers.port}"]
    return [
        ServerPlan(
            url=url,
            argv=(
                *command,
                "--host",
                servers.host,
                "--port",
                str(servers.port + i),
                *(part for key, value in options.items() for part in _argument(rollout.engine, key, value)),
                *node_options,
            ),
            env=env | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus_by_server[i])} if gpus_by_server else {}),
            config_file=keys.config_file,
            secrets=keys.secrets,
            listens=listens,
        )
        for i, url in enumerate(urls)
    ]


def _server_variables(rollout: RolloutConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that all servers need, besides those of the API keys."""
    variables = dict(transfer_variables(rollout, environ))
    if rollout.engine == "vllm":
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": _with_vllm_extension(environ)}
        if rollout.weight_sync.method == "adapter":
            variables |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return variables


def check_engine(engine: str) -> None:
    """Check that an engine has servers."""
    if engine == "local":
        raise ConfigError(
            "rollout.engine = 'local' samples inside the trainer and has no servers; set rollout.engine to 'sglang' or "
            "'vllm', or start only the trainer"
        )


def read_api_key(name: str | None, environ: Mapping[str, str], setting: str) -> str | None:
    """Return the value of an environment variable; None if ``name`` is None."""
    if name is None:
        return None
    if not environ.get(name):
        raise ConfigError(f"{setting} = {name!r}: no such environment variable; export {name} with the servers' key")
    return environ[name]


def server_options(
    rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig, *, routed_experts: bool, topk_logprobs: int
) -> dict[str, object]:
    """Return the options that the engine is started with, besides address and keys. The user's values win."""
    engine = rollout.engine
    check_engine(engine)
    user_options = {key.replace("_", "-"): value for key, value in getattr(rollout, engine).items()}
    for key in user_options:
        if key in _RESERVED_OPTIONS:
            raise ConfigError(f"[rollout.{engine}] {key}: {_RESERVED_OPTIONS[key]}")
    options: dict[str, Any] = {
        "model-path" if engine == "sglang" else "model": rollout.servers.model or model.path,
        "dtype": _DTYPES[rollout.dtype],
    }
    if _skips_weights(rollout, model, user_options):
        options["load-format"] = "dummy"
    if routed_experts:
        options["enable-return-routed-experts"] = True
    # With fp32 weights the logits are float32 anyway.
    if rollout.dtype != "fp32":
        options |= _fp32_head_options(engine, user_options)
    if rollout.weight_sync.method == "adapter":
        options |= _adapter_options(engine, lora)
    if engine == "vllm":
        options |= {
            # Of the distribution that was sampled from: after temperature and filters.
            "logprobs-mode": "processed_logprobs",
            # The defaults of generation_config.json would change the sampling.
            "generation-config": "vllm",
            # Without it vLLM rejects /inference/v1/generate.
            "enable-scale-out": True,
            "worker-extension-cls": "megatron_dppo_vllm.WorkerExtension",
            "weight-transfer-config": {"backend": "megatron_dppo"},
        }
        # By itself vLLM keeps recurrent states in the model's dtype. SGLang keeps them in fp32.
        if rollout.dtype != "fp32" and _has_linear_attention(Path(model.path)):
            options["mamba-ssm-cache-dtype"] = "float32"
        if rollout.has_filters:
            options["return-sampling-mask"] = True
        if topk_logprobs:
            # 20 is vLLM's own limit, and it counts the sampled token as one of them.
            options["max-logprobs"] = max(20, topk_logprobs + 1)
    return options | user_options


_OTHER_WEIGHTS = (
    "speculative-",
    "quantization",
    "torchao-",
    "modelopt-",
    "load-format",
    "model-loader-",
    "enable-lora",
    "lora-",
    "enable-eplb",
    "ep-num-redundant-experts",
    "init-expert-location",
)
"""Beginnings of options with which a server has weights, or copies of them, that a sync does not send."""


def _skips_weights(rollout: RolloutConfig, model: ModelConfig, user_options: Mapping[str, object]) -> bool:
    """Return True if the first weight sync sends all weights of a server, and proves it: then it reads no file.

    Until then its weights are random numbers, and no request is sent to it. Only adapters, quantized weights, and what
    ``_OTHER_WEIGHTS`` names come from files.
    """
    if rollout.servers.model is not None or rollout.weight_sync.method == "adapter":
        return False
    if model.random_init:  # there are no files
        return True
    return rollout.weight_sync.checksum_every > 0 and not any(key.startswith(_OTHER_WEIGHTS) for key in user_options)


def _fp32_head_options(engine: str, user_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for logits in float32, as in the trainer's head.

    Rounded logits are most of the difference between engine and trainer. vLLM reads the option among the overrides of
    the model's config, so it is added to the user's overrides, unless they set it.
    """
    if engine == "sglang":
        return {"enable-fp32-lm-head": True}
    name = "hf-overrides"
    override = {"head_dtype": "float32"}
    if isinstance(user_options.get(name), dict):
        # Merged here, because the user's value replaces ours at the end.
        user_options[name] = override | user_options[name]
    return {name: override}


def _has_linear_attention(folder: Path) -> bool:
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return "linear_num_value_heads" in (values.get("text_config") or values)


_SGLANG_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""SGLang's names of the modules in the experts of Mixtral and MiniMax-M2 (lora/lora.py, 0.5.23)."""
_EXPERT_MODULES = {*_SGLANG_EXPERTS, *_SGLANG_EXPERTS.values()}


def sglang_targets(targets: Sequence[str]) -> list[str]:
    """Return target modules by SGLang's names. Names in the adapter's file stay as they are: SGLang renames them."""
    return [_SGLANG_EXPERTS.get(name, name) for name in targets]


def _vllm_targets(targets: Sequence[str]) -> list[str]:
    """Return target modules as vLLM filters them: all experts of a layer are one module there (lora/utils.py, 0.32)."""
    return [*targets, *["experts"] * (not _EXPERT_MODULES.isdisjoint(targets))]


def _adapter_options(engine: str, lora: LoraConfig) -> dict[str, Any]:
    """Return the options for LoRA adapters of a run."""
    named = sglang_targets if engine == "sglang" else _vllm_targets
    options: dict[str, Any] = {"enable-lora": True, "lora-target-modules": named(lora.target_modules)}
    if engine == "sglang":
        # Two, because SGLang's own health check is a request for the base weights.
        return options | {"max-lora-rank": lora.rank, "max-loras-per-batch": 2}
    ranks = [rank for rank in _VLLM_LORA_RANKS if rank >= lora.rank]
    if not ranks:
        raise ConfigError(f"lora.rank = {lora.rank}: vLLM takes adapters up to rank {_VLLM_LORA_RANKS[-1]}; lower it")
    return options | {"max-lora-rank": ranks[0], "max-loras": 1}


def _argument(engine: str, key: str, value: object) -> list[str]:
    """Return ``--key value`` as arguments of a command line."""
    match value:
        case True:
            return [f"--{key}"]
        case False:
            return []
        case dict():
            return [f"--{key}", json.dumps(value)]
        case list() if value and not any(isinstance(part, bool | list | dict) for part in value):
            return [f"--{key}", *map(str, value)]
        case str() | int() | float():
            return [f"--{key}", str(value)]
    raise ConfigError(
        f"[rollout.{engine}] {key} = {value!r} cannot be an argument; expected a string, a number, true or false, a "
        "table (becomes JSON) or a list of strings and numbers"
    )


@dataclass(frozen=True)
class _Keys:
    """The API keys of a server, in the form that its engine accepts. Never arguments, which any user can read."""

    env: dict[str, str]
    config_file: dict[str, str]
    secrets: tuple[str, ...]


def _read_keys(rollout: RolloutConfig, environ: Mapping[str, str]) -> _Keys:
    servers = rollout.servers
    key = read_api_key(servers.api_key_env, environ, "rollout.servers.api_key_env")
    admin = read_api_key(servers.admin_api_key_env, environ, "rollout.servers.admin_api_key_env")
    secrets = tuple(secret for secret in (key, admin) if secret)
    if rollout.engine == "vllm":
        if admin is not None:
            raise ConfigError(
                f"rollout.servers.admin_api_key_env = {servers.admin_api_key_env!r}: vLLM has one key for all calls; "
                "use api_key_env"
            )
        return _Keys({"VLLM_API_KEY": key} if key else {}, {}, secrets)
    options = {"api-key": key, "admin-api-key": admin}
    return _Keys({}, {name: value for name, value in options.items() if value}, secrets)


def _with_vllm_extension(environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the folder from which vLLM loads its part of the weight transfer."""
    return os.pathsep.join(part for part in (str(VLLM_EXTENSION), environ.get("PYTHONPATH")) if part)


def _split_gpus(
    rollout: RolloutConfig, options: Mapping[str, object], gpus: Sequence[str], skip: int
) -> list[list[str]]:
    """Return the GPUs of each server; an empty list on a machine without GPUs."""
    if not gpus:
        return []
    nodes = count_nodes(rollout.engine, options)
    size = count_gpus_per_server(rollout.engine, options)
    if size % nodes:
        raise ConfigError(f"[rollout.{rollout.engine}] nnodes = {nodes} does not divide the {size} GPUs of a server")
    size //= nodes
    count = rollout.servers.count
    if len(gpus) < skip + size * count:
        trainer = f" + {skip} for the trainer" if skip else ""
        raise ConfigError(
            f"rollout.servers.count = {count} servers of {size} GPUs{trainer} need {skip + size * count} GPUs, but "
            f"{len(gpus)} are visible here ({','.join(gpus)}); lower count or tp-size, or make more visible"
        )
    return [list(gpus[skip + i * size : skip + (i + 1) * size]) for i in range(count)]


def count_gpus_per_server(engine: str, options: Mapping[str, object]) -> int:
    """Return the number of GPUs of one server that is started with ``options``."""
    sizes = []
    for names in _SIZE_OPTIONS:
        value = next((options[name] for name in names if name in options), 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"[rollout.{engine}] {names[0]} = {value!r}: expected a whole number of GPUs")
        sizes.append(value)
    if options.get("enable-dp-attention") is True:
        sizes.pop()  # SGLang: data parallel attention runs inside the tensor parallel ranks
    return math.prod(sizes)
