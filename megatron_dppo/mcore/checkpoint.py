"""Megatron torch_dist checkpoints of model, optimizer and random states, complete or absent.

A checkpoint is written to ``step_N.partial`` and renamed to ``step_N`` by one rename after every rank has finished, so
a process that dies in mid-save leaves the older ones untouched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel

from megatron_dppo.errors import CheckpointError
from megatron_dppo.mcore.optim import Optimizer
from megatron_dppo.mcore.setup import random_states, restore_random_states

_STEP = re.compile(r"step_(\d{6,})$")
_STATE = "state.json"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = [p for p in folder.glob("step_*") if _STEP.search(p.name) and (p / _STATE).is_file()]
    return sorted(found, key=lambda p: int(_STEP.search(p.name)[1]))  # type: ignore[index]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The run's own state in a checkpoint (step, data cursor, policy version, configuration).

    Raises:
        CheckpointError: the file is not readable.
    """
    try:
        return json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE} cannot be read: {error}; delete this checkpoint") from error


def save_checkpoint(
    folder: Path,
    step: int,
    models: Sequence[GPTModel],
    optimizer: Optimizer,
    state: dict[str, Any],
    keep: int,
    best: int | None = None,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write ``folder/step_N`` (a collective of all ranks), then delete all but the ``keep`` newest and ``best``.

    ``also`` is called on every rank with the unfinished folder, to write files of its own names there.
    """
    final = folder / _name(step)
    partial = folder / f"{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(models, optimizer, is_loading=False), str(partial))
    if also is not None:
        also(partial)
    dist.barrier()
    if dist.get_rank() == 0:
        with (partial / _STATE).open("w", encoding="utf-8") as file:
            json.dump(state, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        # Only a save of the same step, by a run that was resumed from an older one, can stand there.
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        if best is not None:
            (folder / "best.json").write_text(json.dumps({"checkpoint": _name(best)}) + "\n")
        for old in checkpoints(folder)[:-keep]:
            if best is None or old.name != _name(best):
                shutil.rmtree(old)
    dist.barrier()
    return final


def load_checkpoint(
    checkpoint: Path, models: Sequence[GPTModel], optimizer: Optimizer, *, same_layout: bool = True
) -> None:
    """Restore model and optimizer and, on the same layout, random states (a collective of all ranks).

    Raises:
        CheckpointError: Megatron cannot load it into this model.
    """
    template = _sharded_state(models, optimizer, is_loading=True)
    if not same_layout:
        del template["random_states"]  # one a rank, and the ranks are others now
    loaded = _load(template, checkpoint)
    for key, model in zip(_model_keys(models), models, strict=True):
        model.load_state_dict(loaded[key])
    optimizer.megatron.load_state_dict(loaded["optimizer"])
    if same_layout:
        restore_random_states(loaded["random_states"])


def save_model(folder: Path, models: Sequence[GPTModel]) -> None:
    """Write the weights alone to a new folder (a collective of all ranks)."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_model(models), str(folder))


def load_model(checkpoint: Path, models: Sequence[GPTModel]) -> None:
    """Restore the weights alone, from a checkpoint of any layout (a collective of all ranks).

    Raises:
        CheckpointError: Megatron cannot load it into this model.
    """
    loaded = _load(_sharded_model(models), checkpoint)
    for key, model in zip(_model_keys(models), models, strict=True):
        model.load_state_dict(loaded[key])


def _load(template: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    try:
        with _weights_only():
            return dist_checkpointing.load(template, str(checkpoint))
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {type(error).__name__}: {str(error)[:400]}. It is damaged, or of another "
            "model; start again with run.overwrite = true, or delete it to use an older one"
        ) from error


def _sharded_model(models: Sequence[GPTModel]) -> dict[str, Any]:
    keys = _model_keys(models)
    return {key: model.sharded_state_dict(metadata=dict(_METADATA)) for key, model in zip(keys, models, strict=True)}


def _model_keys(models: Sequence[GPTModel]) -> list[str]:
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]


def _sharded_state(models: Sequence[GPTModel], optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    state = _sharded_model(models)
    model_state = state["model"] if len(models) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=dict(_METADATA))
    rank, world = dist.get_rank(), dist.get_world_size()
    state["random_states"] = ShardedObject("random_states", random_states(), (world,), (rank,))
    return state


@contextmanager
def _weights_only() -> Iterator[None]:
    """Megatron unpickles its files without limits; torch's switch makes every load a weights-only one."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
