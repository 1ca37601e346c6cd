"""Sampling without training, in one process: a configuration's engine with the weights of a folder or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config, ParallelConfig
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import CheckpointError, ConfigError, PublishError
from megatron_dppo.hf import FolderWeights, read_hf_config
from megatron_dppo.platform import Platform, pin_threads
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.server import ServerInfo
from megatron_dppo.rollout.server_engine import ServerEngine
from megatron_dppo.run.engines import connect_servers, open_function, sampling_engine, weight_sync
from megatron_dppo.run.inputs import PromptReader
from megatron_dppo.run.preflight import check_flags
from megatron_dppo.run.resume import newest_usable
from megatron_dppo.run.starts import load_run_config
from megatron_dppo.weights.conversion import open_converter

_VERSION = 0
_OF_A_TRAINER = {"ipc": "the memory of a trainer", "adapter": "the adapters of a trainer"}
"""What methods of the weight sync give that is not the weights of a folder"""


@dataclass(frozen=True)
class Offline:
    """What answers, and how prompts for it are read."""

    config: Config
    engine: RolloutEngine
    prompts: PromptReader
    weights: str
    """which they are, for the reader"""


def offline_config(target: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a TOML file, or of the run in a folder.

    Raises:
        ConfigError: it is neither, or cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this command is one process; start it without torchrun")
    config = load_run_config(target, overrides) if target.is_dir() else load_config(target, overrides)
    check_flags(config)
    return config


@contextmanager
def open_offline(config: Config, *, run: Path | None, model: Path | None, step: int | None) -> Iterator[Offline]:
    """An engine that has the weights.

    Args:
        config: what ``offline_config`` gave.
        run: the folder of a run, whose checkpoint is taken; None = the folder that ``model.path`` names.
        model: a Hugging Face folder instead of either.
        step: of the checkpoint; None = the newest one.

    Raises:
        UserError: there are no such weights, or the servers do not get them.
    """
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, 1)
    hf_config, tokenizer = read_hf_config(config.model.path), load_tokenizer(config.model.path)
    prompts = PromptReader(config, tokenizer, hf_config.max_position_embeddings)
    open_parts = ExitStack()
    servers, function = connect_servers(config), open_parts.enter_context(open_function(config))
    engine = sampling_engine(config, hf_config, tokenizer, platform.device, servers, function)
    try:
        if run is not None and model is None:
            name = _give_checkpoint(config, engine, hf_config, platform.device, run, step)
        else:
            folder, name = FolderWeights(config.model.path), config.model.path
            _give(config, engine, hf_config, platform.device, lambda: folder.stream(tied=hf_config.tie_word_embeddings))
        yield Offline(config, engine, prompts, name)
    finally:
        engine.close()
        open_parts.close()


def _give_checkpoint(
    config: Config, engine: RolloutEngine, hf_config: Any, device: torch.device, run: Path, step: int | None
) -> str:
    """Give the engine the weights of a run's checkpoint; what they are called."""
    from megatron_dppo.mcore.checkpoint_folder import checkpoint_name

    folder = run / "checkpoints"
    with open_converter(config.model.path, ParallelConfig(), config.model.dtype) as converter:
        if step is None:
            checkpoint, _ = newest_usable(folder, accept_unverified=config.checkpoint.accept_unverified)
        else:
            checkpoint = folder / checkpoint_name(step)
        if checkpoint is None or not checkpoint.is_dir():
            there = sorted(path.name for path in folder.glob("step_*"))
            raise CheckpointError(
                f"{str(run)!r} has no {'checkpoint' if step is None else f'checkpoint of step {step}'}; there are "
                f"{', '.join(there) or 'none'}. Name one with --step, or a Hugging Face folder with --model"
            )
        converter.load_megatron(checkpoint)
        _give(config, engine, hf_config, device, converter.export)
    return str(checkpoint)


def _give(
    config: Config,
    engine: RolloutEngine,
    hf_config: Any,
    device: torch.device,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
) -> None:
    """Until the engine has the weights: its copy, or servers by as many attempts as a run makes."""
    if isinstance(engine, LocalEngine):
        engine.update_weights(weights(), _VERSION)
        return
    assert isinstance(engine, ServerEngine)
    method = config.rollout.weight_sync.method
    if method in _OF_A_TRAINER:
        raise ConfigError(
            f"rollout.weight_sync.method = {method!r} gives servers {_OF_A_TRAINER[method]}, and there is none here; "
            "override it: --rollout.weight_sync.method distributed (or disk)"
        )
    sync, good = weight_sync(config, hf_config, device), dict[str, ServerInfo]()
    problems: dict[str, str] = {}
    try:
        for _ in range(config.rollout.weight_sync.attempts):
            result = sync.send(weights(), _VERSION, good)
            good, problems = result.good, {**result.absent, **result.failed}
            if good and not result.failed:
                break
    finally:
        sync.close()
    told = "".join(f"\n  - {url}: {problem}" for url, problem in {**problems, **result.notes}.items())
    if not good:
        raise PublishError(f"no inference server has the weights:{told}")
    if told:
        print(f"of the servers:{told}", flush=True)
    engine.use_version(_VERSION, list(good))
