"""The server process: model parts, service and HTTP server, from start to stop."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, DiskError, ErrorCollector
from megatron_dppo.files import disk_errors
from megatron_dppo.parallel.network import is_loopback
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.process.lock import FolderLock
from megatron_dppo.setup.inputs import read_model
from megatron_dppo_engines.serving.processes import StopRequest

_KEY_FILE = "tinker_key"
_KEY_PREFIX = "tml-"
"""Prefix without which the SDK refuses a key."""
_IDLE_SECONDS = 0.2
"""Time in which a stop signal is noticed."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server that are no keys of the configuration."""

    host: str = "127.0.0.1"
    port: int = 0
    base_model: str | None = None
    """Name of the model for clients. None uses ``model.path``."""
    max_models: int = 2
    max_body_bytes: int = 64 << 20
    key_variable: str = "TINKER_API_KEY"


def check_config(config: Config) -> None:
    """Raise ``ConfigError`` with the first key that prevents that a configuration is served."""
    if config.lora.rank < 1:
        raise ConfigError("lora.rank = 0: the Tinker API trains adapters. Fix: set the largest rank, as lora.rank = 32")
    if config.rollout.engine != "local":
        raise ConfigError(
            f"rollout.engine = {config.rollout.engine!r}: this server samples with the local engine. Fix: set 'local'"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(f"rollout.temperature = {config.rollout.temperature}: losses of the Tinker API need 1")
    if config.model.random_init:
        raise ConfigError("model.random_init = true is not served. Fix: name a folder with weights")
    if config.train.router_replay != "off":
        raise ConfigError(f"train.router_replay = {config.train.router_replay!r}: requests carry no routes. Fix: 'off'")
    if config.parallel.overlap_grad_reduce:
        raise ConfigError("parallel.overlap_grad_reduce: gradients are summed over calls before. Fix: remove it")
    if any("aux_loss_coeff" in name for name in config.model.transformer):
        raise ConfigError("model.transformer.moe_aux_loss_coeff is not a part of the API's losses. Fix: remove it")


def read_key(variable: str, folder: Path) -> tuple[str, str]:
    """Return the API key of a variable and where its owner finds it, never the key itself.

    Without the variable a new key is made, in a file of the folder that only its owner can read.
    """
    key = os.environ.get(variable, "")
    if not key:
        key = f"{_KEY_PREFIX}{secrets.token_urlsafe(32)}"
        file = folder / _KEY_FILE
        with disk_errors(file, "the API key"):
            file.unlink(missing_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as target:
                target.write(f"{key}\n")
        return key, f'export TINKER_API_KEY="$(cat {file})"'
    if not key.startswith(_KEY_PREFIX) or len(key) < 20:
        raise ConfigError(
            f"the key in {variable} has {len(key)} characters; expected at least 20, which begin with {_KEY_PREFIX!r}. "
            "Fix: unset it, and the server makes one"
        )
    return key, f"the key is that of {variable}"


def serve(config: Config, options: ServeOptions, report: Callable[[str], None]) -> None:
    """Serve a configuration that ``check_config`` has accepted, until SIGTERM, SIGINT or SIGHUP."""
    folder = Path(config.run.output_dir)
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, 1)
    problems = ErrorCollector()
    inputs = read_model(config, 1, problems).complete
    problems.raise_if_any()
    assert inputs is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise DiskError(f"run.output_dir = {str(folder)!r} cannot be used: {error}") from error

    # Megatron is imported from here on. Its shims must be applied before the first import.
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo.mcore import setup
    from megatron_dppo.run.policy_setup import build_groups
    from megatron_dppo_tinker.models import ModelParts
    from megatron_dppo_tinker.server import TinkerServer
    from megatron_dppo_tinker.service import Limits, Service

    try:
        setup.start_process_group(platform, config.run.wait_minutes)
        groups = build_groups(config.run, inputs, platform, setup.new_host_world(config.run.wait_minutes))
        key, where = read_key(options.key_variable, folder)
        parts = ModelParts(config, inputs, groups, platform)
        name = options.base_model or config.model.path
        service = Service(parts, name, folder / "tinker", Limits(max_models=options.max_models))
        with StopRequest() as stop:
            try:
                server = TinkerServer(service, key, options.host, options.port, options.max_body_bytes)
            except OSError as error:
                raise ConfigError(f"cannot listen on {options.host}, port {options.port}: {error}") from error
            if not is_loopback(options.host):
                report("warning  the connection is not encrypted: anybody on the network can read the key")
            report(f"model    {name}; adapters up to rank {config.lora.rank}, checkpoints in {service.folder}")
            report(f"key      {where}")
            report(f'tinker   export TINKER_BASE_URL="{server.url}"')
            while not stop.is_due:
                service.work(_IDLE_SECONDS, server.announce)
            server.close()
            service.close()
    finally:
        setup.shutdown_megatron()
        lock.release()
