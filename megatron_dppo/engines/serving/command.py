"""The command line and environment of each inference server that a configuration asks for."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.config.model import LoraConfig, ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import ConfigError

_MODULES = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_ELSEWHERE = {
    "host": "set rollout.servers.host",
    "port": "set rollout.servers.port",
    "api-key": "name an environment variable in rollout.servers.api_key_env: a key in a file is saved with the run",
    "admin-api-key": "name an environment variable in rollout.servers.admin_api_key_env",
}
"""Arguments that a section for the engine may not hold, and where they belong."""

_WORLD = (
    ("tensor-parallel-size", "tp-size", "tp"),
    ("pipeline-parallel-size", "pp-size", "pp"),
    ("data-parallel-size", "dp-size", "dp"),
)
"""Names of the sizes whose product is the number of GPUs of one server."""

_RELEASING: Mapping[str, dict[str, Any]] = {
    "sglang": {"enable-memory-saver": True},
    "vllm": {"enable-sleep-mode": True},
}
"""What a server needs to release its memory."""

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be (vllm/config/lora.py, 0.32)."""

_VLLM_EXTENSION = Path(__file__).parent / "vllm_extension"
"""Folder that vLLM servers load. Not a part of this package: it imports vLLM."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """How to start one server."""

    url: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    """added to this process's environment"""
    config_file: dict[str, str] = field(default_factory=dict, repr=False)
    """arguments that must not be in the process list: they go to the server in a file, as ``--config FILE``"""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """keys, to be struck out of whatever is shown of the log"""


def plan_servers(
    rollout: RolloutConfig,
    options: dict[str, Any],
    environ: Mapping[str, str],
    gpus: Sequence[str] = (),
    skip_gpus: int = 0,
) -> list[ServerPlan]:
    """One plan for each of ``rollout.servers.count`` servers on this machine.

    Args:
        rollout: with the engine ``sglang`` or ``vllm``.
        options: ``server_options`` of the run.
        environ: where the API keys are.
        gpus: devices that this process may use, as in CUDA_VISIBLE_DEVICES; empty = a machine without.
        skip_gpus: the first ones are left to the trainer; colocated servers get the first ones, too.

    Raises:
        ConfigError: a missing key, too few GPUs.
    """
    servers = rollout.servers
    if servers.colocated and gpus:  # without GPUs nothing can be released, and the flags are refused
        options = _RELEASING[rollout.engine] | options
    shares = _split_gpus(rollout, options, gpus, 0 if servers.colocated else skip_gpus)
    env, config_file, secrets = _keys(rollout, environ)
    if config_file and "config" in options:
        raise ConfigError(
            "[rollout.sglang] config: the API key is handed over by --config, and SGLang takes only one such file; "
            "write its content into [rollout.sglang], or leave rollout.servers.api_key_env out"
        )
    if rollout.engine == "vllm":
        env |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": _with_vllm_extension(environ)}
        if rollout.weight_sync.method == "adapter":
            env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = servers.command or [sys.executable, "-m", _MODULES[rollout.engine]]
    return [
        ServerPlan(
            url=url,
            argv=(
                *command,
                "--host",
                servers.host,
                "--port",
                str(servers.port + i),
                *_arguments(rollout.engine, options),
            ),
            env=env | ({"CUDA_VISIBLE_DEVICES": ",".join(shares[i])} if shares else {}),
            config_file=config_file,
            secrets=secrets,
        )
        for i, url in enumerate(servers.resolved_urls)
    ]


def check_engine(engine: str) -> None:
    """Refuse a run without servers.

    Raises:
        ConfigError: ``engine = "local"``.
    """
    if engine == "local":
        raise ConfigError(
            "rollout.engine = 'local' samples inside the trainer and has no servers; set rollout.engine to 'sglang' or "
            "'vllm', or start only the trainer"
        )


def api_key(name: str | None, environ: Mapping[str, str], setting: str) -> str | None:
    """The value of the environment variable ``name``, which the key ``setting`` of the configuration holds.

    Raises:
        ConfigError: it is not set.
    """
    if name is None:
        return None
    if not environ.get(name):
        raise ConfigError(f"{setting} = {name!r}: no such environment variable; export {name} with the servers' key")
    return environ[name]


def server_options(
    rollout: RolloutConfig, model: ModelConfig, lora: LoraConfig, *, routed_experts: bool, topk_logprobs: int
) -> dict[str, Any]:
    """Return the options that the engine is started with besides address and keys; the user's own values win.

    Args:
        rollout: with the engine ``sglang`` or ``vllm``.
        model: the policy.
        lora: adapters of the weight sync method ``adapter``.
        routed_experts: servers report which experts they chose.
        topk_logprobs: number of most probable tokens that they report; 0 = none.

    Raises:
        ConfigError: ``engine = "local"``, an argument that belongs elsewhere, a rank that vLLM has no adapters of.
    """
    engine = rollout.engine
    check_engine(engine)
    own = {key.replace("_", "-"): value for key, value in getattr(rollout, engine).items()}
    for key in own:
        if key in _ELSEWHERE:
            raise ConfigError(f"[rollout.{engine}] {key}: {_ELSEWHERE[key]}")
    options: dict[str, Any] = {
        "model-path" if engine == "sglang" else "model": rollout.servers.model or model.path,
        "dtype": _DTYPES[rollout.dtype],
    }
    if model.random_init and rollout.servers.model is None:
        # There are no weights to read; the first sync brings them.
        options["load-format"] = "dummy"
    if routed_experts:
        options["enable-return-routed-experts"] = True
    if rollout.dtype != "fp32":
        options |= _fp32_head(engine, own)
    if rollout.weight_sync.method == "adapter":
        options |= _adapters(engine, lora)
    if engine == "vllm":
        options |= {
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "enable-scale-out": True,
            "worker-extension-cls": "megatron_dppo_vllm.WorkerExtension",
            "weight-transfer-config": {"backend": "megatron_dppo"},
        }
        if rollout.has_filters:
            options["return-sampling-mask"] = True
        if topk_logprobs:
            # 20 is vLLM's own limit, and it counts the sampled token as one of them.
            options["max-logprobs"] = max(20, topk_logprobs + 1)
    return options | own


def _fp32_head(engine: str, own: dict[str, Any]) -> dict[str, Any]:
    """Logits in float32, as the trainer's head has them; rounded ones are most of what is between the two.

    vLLM takes it among other overrides of the model's config: the user's own ones get it too, unless they have it.
    """
    if engine == "sglang":
        return {"enable-fp32-lm-head": True}
    name, head = "hf-overrides", {"head_dtype": "float32"}
    if isinstance(own.get(name), dict):
        own[name] = head | own[name]
    return {name: head}


def _adapters(engine: str, lora: LoraConfig) -> dict[str, Any]:
    """What a server needs to add the adapters of a run to its weights."""
    options: dict[str, Any] = {"enable-lora": True, "lora-target-modules": list(lora.target_modules)}
    if engine == "sglang":
        # One of each batch may be for the bare weights: SGLang's own health check.
        return options | {"max-lora-rank": lora.rank, "max-loras-per-batch": 2}
    sizes = [size for size in _VLLM_RANKS if size >= lora.rank]
    if not sizes:
        raise ConfigError(f"lora.rank = {lora.rank}: vLLM takes adapters up to rank {_VLLM_RANKS[-1]}; lower it")
    return options | {"max-lora-rank": sizes[0], "max-loras": 1}


def _arguments(engine: str, options: Mapping[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in _argument(engine, key, value)]


def _argument(engine: str, key: str, value: Any) -> list[str]:
    """``--key value`` in the words of a command line."""
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


def _keys(rollout: RolloutConfig, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """The API keys: environment, lines of a configuration file, and the plain values. Never arguments: anyone on the
    machine can read those."""
    servers = rollout.servers
    key = api_key(servers.api_key_env, environ, "rollout.servers.api_key_env")
    admin = api_key(servers.admin_api_key_env, environ, "rollout.servers.admin_api_key_env")
    secrets = tuple(secret for secret in (key, admin) if secret)
    if rollout.engine == "vllm":
        if admin is not None:
            raise ConfigError(
                f"rollout.servers.admin_api_key_env = {servers.admin_api_key_env!r}: vLLM has one key for all calls; "
                "use api_key_env"
            )
        return ({"VLLM_API_KEY": key} if key else {}), {}, secrets
    named = {"api-key": key, "admin-api-key": admin}
    return {}, {name: value for name, value in named.items() if value}, secrets


def _with_vllm_extension(environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the folder from which vLLM loads its part of the weight transfer."""
    return os.pathsep.join(part for part in (str(_VLLM_EXTENSION), environ.get("PYTHONPATH")) if part)


def _split_gpus(rollout: RolloutConfig, options: Mapping[str, Any], gpus: Sequence[str], skip: int) -> list[list[str]]:
    """The GPUs of each server; an empty list on a machine without."""
    if not gpus:
        return []
    each = gpus_per_server(rollout.engine, options)
    count = rollout.servers.count
    if len(gpus) < skip + each * count:
        trainer = f" + {skip} for the trainer" if skip else ""
        raise ConfigError(
            f"rollout.servers.count = {count} servers of {each} GPUs{trainer} need {skip + each * count} GPUs, but "
            f"{len(gpus)} are visible here ({','.join(gpus)}); lower count or tp-size, or make more visible"
        )
    return [list(gpus[skip + i * each : skip + (i + 1) * each]) for i in range(count)]


def gpus_per_server(engine: str, options: Mapping[str, Any]) -> int:
    """Return the number of GPUs of one server that is started with ``options``.

    Raises:
        ConfigError: a size that is not a whole number above 0.
    """
    sizes = []
    for names in _WORLD:
        value = next((options[name] for name in names if name in options), 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"[rollout.{engine}] {names[0]} = {value!r}: expected a whole number of GPUs")
        sizes.append(value)
    if options.get("enable-dp-attention") is True:
        sizes.pop()  # SGLang: data parallel attention is inside of the tensor parallel ranks
    return math.prod(sizes)
