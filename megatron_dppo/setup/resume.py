"""Choice of the checkpoint that a run resumes from, before any model is built."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_dppo.config.layout import layer_split
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.config.run import CheckpointConfig
from megatron_dppo.config.run_state import find_schema_problem
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder
from megatron_dppo.report.records import read_metrics
from megatron_dppo.setup.changes import (
    Change,
    ServedModels,
    check_changes,
    find_changes,
    find_content_changes,
    find_served_changes,
)
from megatron_dppo.setup.contents import Contents
from megatron_dppo.setup.failed_functions import may_differ
from megatron_dppo.setup.inputs import Inputs, ModelInputs
from megatron_dppo.setup.starts import read_starts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_SPLIT = " layers "
"""Text between a layout and the fields that split its layers unevenly."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A newer checkpoint that the run cannot resume from."""

    checkpoint: Path
    kind: str
    """``damaged`` or ``nonfinite``. The folder is renamed to ``step_N.KIND``."""
    reason: str


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that this run can resume from."""

    checkpoint: Path
    same_layout: bool
    """True if the run resumes bit for bit. False if the curve is the same up to rounding."""
    changes: tuple[Change, ...] = ()
    """Configuration keys that differ from the run so far and are allowed to."""
    skipped_checkpoints: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints, the newest first."""
    is_fork: bool = False
    """True if the checkpoint is from another run, whose settings may differ."""
    same_stream: bool = True
    """False if a fork has other prompts or another order. It then starts at the first prompt."""
    served: ServedModels = field(default_factory=dict)
    """Models behind URLs that the run used so far."""


def run_identity(lora: LoraConfig, seed: int, inputs: Inputs) -> dict[str, object]:
    """Return the values that a checkpoint must share with a run, on any layout."""
    hf_config = inputs.hf_config
    adapters = {"lora": [lora.rank, sorted(lora.target_modules)]} if lora.rank else {}
    identity = {
        "model": {**asdict(model_shape(hf_config)), "tied": bool(hf_config.tie_word_embeddings), **adapters},
        "seed": seed,
        "prompts": inputs.train_prompts.fingerprint(),
    }
    # The value that a checkpoint reads back, which has lists for tuples.
    return cast(dict[str, Any], json.loads(json.dumps(identity)))


def layout_identity(model: ModelConfig, parallel: ParallelConfig, inputs: ModelInputs) -> dict[str, object]:
    """Return the properties of a layout that a checkpoint is written on."""
    split = layer_split(model.transformer)
    return {
        "layout": f"{inputs.layout}{_SPLIT}{json.dumps(split)}" if split else str(inputs.layout),
        "world_size": inputs.layout.world_size,
        "has_expert_parallelism": inputs.layout.ep > 1,
        "virtual_pipeline_size": inputs.layout.vpp,
        "use_distributed_optimizer": parallel.use_distributed_optimizer,
    }


def differing_fields(old: object, new: object) -> tuple[object, object]:
    """Return two values of an identity; of tables only the fields that differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old, new
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: old.get(key) for key in keys}, {key: new.get(key) for key in keys}


def find_resume_point(
    config: Config, inputs: Inputs, contents: Contents, served: ServedModels | None = None
) -> ResumePoint | None:
    """Return the newest checkpoint with intact files and finite weights; a collective of all ranks.

    Without a checkpoint in the run's folder it is that of ``checkpoint.fork_from``. ``contents`` and ``served`` are of
    this start, as rank 0 read them.
    """
    from megatron_dppo.mcore.checkpoint.folder import read_state
    from megatron_dppo.parallel.objects import broadcast_object, run_on_leader

    if config.checkpoint.resume != "auto":
        return None
    # A folder of that name ends the start here, before any checkpoint is renamed or pruned.
    metrics = Path(config.run.output_dir) / "metrics.jsonl"
    run_on_leader(lambda: len(read_metrics(metrics, skip_damaged=True)), _world())
    folder = checkpoints_folder(Path(config.run.output_dir))
    chosen, skipped_checkpoints = find_usable_checkpoint(folder, accept_unverified=config.checkpoint.accept_unverified)
    is_fork = chosen is None and config.checkpoint.fork_from is not None
    if is_fork:
        chosen = _fork_point(config.checkpoint)
    if chosen is None:
        return None
    state = read_state(chosen)

    identity = run_identity(config.lora, config.run.seed, inputs)
    same_stream = _has_same_stream(state, chosen, identity, config.data.train, is_fork=is_fork)
    current = layout_identity(config.model, config.parallel, inputs)
    same_layout = _has_same_layout(state["layout"], chosen, current, has_chunks=inputs.layout.vpp > 1)
    # Settings: those that change the results need checkpoint.accept_changes, except in a fork.
    saved_models = state.get("served", {})
    changes = broadcast_object(
        lambda: find_changes_since(state, chosen, config, contents) + find_served_changes(saved_models, served or {}),
        _world(),
    )
    check_changes(changes, chosen, accepted=is_fork or config.checkpoint.accept_changes)
    if is_fork:
        _check_fork_step(chosen, state["step"], config.run.num_steps)
    return ResumePoint(
        chosen,
        same_layout,
        changes=tuple(changes),
        skipped_checkpoints=tuple(skipped_checkpoints),
        is_fork=is_fork,
        same_stream=same_stream,
        served=saved_models,
    )


def _check_fork_step(checkpoint: Path, step: int, num_steps: int) -> None:
    if step >= num_steps:
        raise CheckpointError(
            f"checkpoint.fork_from = {str(checkpoint)!r} is at step {step}, and run.num_steps = {num_steps} counts "
            "from the beginning of that run. Fix: raise run.num_steps"
        )


def _has_same_stream(
    state: Mapping[str, Any],
    checkpoint: Path,
    identity: Mapping[str, object],
    sources: str | Sequence[str],
    *,
    is_fork: bool,
) -> bool:
    """Return True if model, seed and data are those of the checkpoint. A fork may have another seed and other data."""
    differing = [key for key, value in identity.items() if state["identity"][key] != value]
    if refused := [key for key in differing if key == "model" or not is_fork]:
        key = refused[0]
        old, new = differing_fields(state["identity"][key], identity[key])
        there = "" if key != "prompts" else f" (data.train = {state['config']['data']['train']!r})"
        here = "" if key != "prompts" else f" (data.train = {sources!r})"
        raise CheckpointError(
            f"{checkpoint} was written with {key} = {old}{there}, this run has {new}{here}. "
            "Fix: use the same value, or another run.output_dir"
        )
    return not differing


def _has_same_layout(
    saved: Mapping[str, object], checkpoint: Path, current: Mapping[str, object], *, has_chunks: bool
) -> bool:
    """Return True if the current layout is the one saved in the checkpoint."""
    splits = [str(layout["layout"]).partition(_SPLIT)[2] for layout in (saved, current)]
    if has_chunks and splits[0] != splits[1]:
        raise CheckpointError(
            f"{checkpoint} was written on {saved['layout']}, this run has {current['layout']}: "
            f"{CANNOT_RESHARD['virtual_pipeline_size']}. Fix: split the layers as before, or start a new run from the "
            "exported Hugging Face folder"
        )
    for key, reason in CANNOT_RESHARD.items():
        if current[key] != saved[key]:
            raise CheckpointError(
                f"{checkpoint} was written on {saved['layout']} with {key} = {saved[key]}, this run "
                f"({current['layout']}) has {current[key]}: {reason}. Fix: use the old value, or start a new run from "
                "the exported Hugging Face folder"
            )
    return all(saved[key] == current[key] for key in ("layout", "world_size"))


def find_changes_since(state: Mapping[str, Any], checkpoint: Path, config: Config, contents: Contents) -> list[Change]:
    """Return the configuration keys and files that differ from the run that wrote a checkpoint."""
    folder = state.get("cwd")
    if folder is None:  # written by an older version
        starts = read_starts(checkpoint.parent.parent)
        before = [start for start in starts if (start.get("resumed_step") or 0) < state["step"]]
        folder = before[-1].get("cwd") if before else None
    saved = state.get("contents", {})
    changes = find_changes(state["config"], config, Path(folder or ""), saved, contents)
    # Another value of a key is one change, whatever its files hold.
    changed = {change.key for change in changes}
    saved = {key: files for key, files in saved.items() if key not in changed}
    changes += find_content_changes(saved, contents, config)
    run = Path(config.run.output_dir)
    changes = [
        change._replace(kind="repaired")
        if change.kind == "results" and may_differ(run, state["step"], change.key)
        else change
        for change in changes
    ]
    return sorted(changes, key=lambda change: (change.key, change.file))


def _world() -> ProcessGroup | None:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def _fork_point(checkpoint: CheckpointConfig) -> Path:
    """Return the checkpoint of another run that this one starts from."""
    path = str(checkpoint.fork_from)
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint.fork_from = {path!r} is not a folder; expected a checkpoint of a run, as in "
            "RUN/checkpoints/step_000020"
        )
    problem = _find_problem(folder, accept_unverified=checkpoint.accept_unverified)
    if problem is not None:
        raise CheckpointError(f"checkpoint.fork_from = {path!r} cannot be used: {problem.reason}")
    return folder


CANNOT_RESHARD = {
    "has_expert_parallelism": "Megatron separates the optimizer state of the experts only with expert parallelism "
    "above 1, and cannot convert between the two",
    "virtual_pipeline_size": "resharding of an interleaved pipeline is not supported",
    "use_distributed_optimizer": "the two optimizers have different checkpoint formats",
}


def find_usable_checkpoint(
    folder: Path, *, accept_unverified: bool = False
) -> tuple[Path | None, list[SkippedCheckpoint]]:
    """Return the checkpoint to resume from, None without any, and the newer ones that are skipped; a collective."""
    import torch.distributed as dist

    from megatron_dppo.mcore.checkpoint.folder import checkpoints
    from megatron_dppo.parallel.objects import broadcast_object

    # Rank 0 lists the folder for all: a file system may show the ranks different contents.
    candidates = broadcast_object(lambda: checkpoints(folder), dist.group.WORLD)
    skipped: list[SkippedCheckpoint] = []
    for checkpoint in reversed(candidates):
        problem = _find_problem(checkpoint, accept_unverified=accept_unverified)
        if problem is None:
            return checkpoint, skipped
        skipped.append(problem)
    if not candidates:
        return None, []
    reasons = "\n".join(f"  {each.checkpoint.name}: {each.reason}" for each in skipped)
    raise CheckpointError(
        f"no checkpoint in {folder} can be resumed:\n{reasons}\n"
        "Fix: restore a copy of one, or start over in another run.output_dir (run.overwrite = true moves this run "
        "aside). checkpoint.accept_unverified = true accepts a checkpoint without a manifest"
    )


def _find_problem(checkpoint: Path, *, accept_unverified: bool) -> SkippedCheckpoint | None:
    """Return why a run cannot resume from a checkpoint, or None if it can; a collective of all ranks."""
    from megatron_dppo.mcore.checkpoint.folder import read_state
    from megatron_dppo.mcore.checkpoint.save_load import NO_MANIFEST, find_damage

    damage = find_damage(checkpoint)
    if damage and not (damage == NO_MANIFEST and accept_unverified):
        return SkippedCheckpoint(checkpoint, "damaged", damage)
    try:
        state = read_state(checkpoint)
    except CheckpointError as error:
        return SkippedCheckpoint(checkpoint, "damaged", str(error))
    if problem := find_schema_problem(state):
        return SkippedCheckpoint(checkpoint, "damaged", f"state.json {problem}, which a run does not write")
    if state.get("finite", True) is not True:
        return SkippedCheckpoint(checkpoint, "nonfinite", "its weights or optimizer state are not finite")
    return None
