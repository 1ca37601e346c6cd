"""Which checkpoint a run continues from, and whether it can: decided before any model is built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder
from megatron_dppo.report.records import read_metrics
from megatron_dppo.run.changes import Change, changes_between, check_changes
from megatron_dppo.run.inputs import Inputs, ModelInputs


@dataclass(frozen=True)
class PassedOver:
    """A newer checkpoint that the run does not continue from."""

    checkpoint: Path
    kind: str
    """``damaged`` or ``nonfinite``; it is renamed to ``step_N.KIND``"""
    reason: str


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that this run can continue from."""

    checkpoint: Path
    same_layout: bool
    """True = bit for bit; False = the same curve up to rounding."""
    changes: tuple[Change, ...] = ()
    """keys that differ from the run so far, and may"""
    passed_over: tuple[PassedOver, ...] = ()
    """newer checkpoints, the newest first"""
    is_fork: bool = False
    """it is of another run, whose settings need not be these"""
    same_stream: bool = True
    """False = a fork has other prompts, or another order of them; it begins with the first"""


def run_identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What a checkpoint must agree with, on any layout."""
    hf_config = inputs.hf_config
    lora = {"lora": [config.lora.rank, sorted(config.lora.target_modules)]} if config.lora.rank else {}
    identity = {
        "model": {**vars(model_shape(hf_config)), "tied": bool(hf_config.tie_word_embeddings), **lora},
        "seed": config.run.seed,
        "data": config.data.train,
        "prompts": inputs.train_prompts.fingerprint(),
    }
    return cast(dict[str, Any], json.loads(json.dumps(identity)))  # as it reads back: JSON has no tuples


def layout_identity(config: Config, inputs: ModelInputs) -> dict[str, Any]:
    """The layout a checkpoint was written on."""
    return {
        "layout": str(inputs.layout),
        "world_size": inputs.layout.world_size,
        "has_expert_parallelism": inputs.layout.ep > 1,
        "virtual_pipeline_size": inputs.layout.vpp,
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
    }


def find_resume_point(config: Config, inputs: Inputs) -> ResumePoint | None:
    """The newest checkpoint of the run whose files are whole and whose weights are finite; None when the run has none
    at all (a collective of all ranks).

    Raises:
        DataError: its metrics.jsonl, which goes on with the run, is damaged.
        CheckpointError: there are checkpoints but none is usable; or the usable one is of another model, seed or data,
            of a layout that Megatron cannot reshard from, or of a run with other settings (``run/changes.py``).
    """
    import torch.distributed as dist

    from megatron_dppo.mcore.checkpoint.save_load import read_state
    from megatron_dppo.parallel.objects import agreed

    if config.checkpoint.resume != "auto":
        return None
    records = Path(config.run.output_dir) / "metrics.jsonl"
    agreed(lambda: len(read_metrics(records)), dist.group.WORLD if dist.is_initialized() else None)
    folder = checkpoints_folder(Path(config.run.output_dir))
    chosen, passed_over = newest_usable(folder, accept_unverified=config.checkpoint.accept_unverified)
    is_fork = chosen is None and config.checkpoint.fork_from is not None
    if is_fork:
        chosen = _fork_point(config)
    if chosen is None:
        return None
    state = read_state(chosen)
    differing = [key for key, mine in run_identity(config, inputs).items() if state["identity"][key] != mine]
    if refused := [key for key in differing if key == "model" or not is_fork]:
        mine = run_identity(config, inputs)[refused[0]]
        raise CheckpointError(
            f"{chosen} was written with {refused[0]} = {state['identity'][refused[0]]}, this run has {mine}; it is "
            "another run. Use the same value, or another run.output_dir"
        )
    here, there = layout_identity(config, inputs), state["layout"]
    same = here["layout"] == there["layout"] and here["world_size"] == there["world_size"]
    for key, reason in CANNOT_RESHARD.items():
        if here[key] != there[key]:
            raise CheckpointError(
                f"{chosen} was written on {there['layout']} with {key} = {there[key]}, this run ({here['layout']}) "
                f"has {here[key]}: {reason}. Use the old value, or start again from the exported Hugging Face folder"
            )
    changes = changes_between(state["config"], config)
    check_changes(changes, chosen, accepted=config.checkpoint.accept_changes or is_fork)
    if is_fork and state["step"] >= config.run.num_steps:
        raise CheckpointError(
            f"checkpoint.fork_from = {str(chosen)!r} is of step {state['step']}, and run.num_steps = "
            f"{config.run.num_steps} counts from the beginning of the other run; raise it"
        )
    return ResumePoint(chosen, same, tuple(changes), tuple(passed_over), is_fork, not differing)


def _fork_point(config: Config) -> Path:
    """The checkpoint of another run that this one begins with.

    Raises:
        CheckpointError: it is none, or is damaged.
    """
    named = str(config.checkpoint.fork_from)
    checkpoint = Path(named)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"checkpoint.fork_from = {named!r} is no folder; name a checkpoint of a run, as in "
            "RUN/checkpoints/step_000020"
        )
    if problem := _why_unusable(checkpoint, accept_unverified=config.checkpoint.accept_unverified):
        raise CheckpointError(f"checkpoint.fork_from = {named!r} cannot be used: {problem[1]}")
    return checkpoint


CANNOT_RESHARD = {
    "has_expert_parallelism": "Megatron keeps the optimizer state of experts apart only with expert parallelism above "
    "1, and cannot convert between the two",
    "virtual_pipeline_size": "resharding of an interleaved pipeline is not supported",
    "use_distributed_optimizer": "the two optimizers have different checkpoint formats",
}


def newest_usable(folder: Path, *, accept_unverified: bool = False) -> tuple[Path | None, list[PassedOver]]:
    """The checkpoint to continue from, and the newer ones that are not used; None when there is none at all.

    A collective of all ranks, which share the reading.

    Raises:
        CheckpointError: there are some, and none can be used.
    """
    import torch.distributed as dist

    from megatron_dppo.mcore.checkpoint.save_load import checkpoints
    from megatron_dppo.parallel.objects import from_leader

    found = from_leader(lambda: checkpoints(folder), dist.group.WORLD)
    passed_over: list[PassedOver] = []
    for checkpoint in reversed(found):
        if problem := _why_unusable(checkpoint, accept_unverified=accept_unverified):
            passed_over.append(PassedOver(checkpoint, *problem))
        else:
            return checkpoint, passed_over
    if not found:
        return None, []
    reasons = "\n".join(f"  {each.checkpoint.name}: {each.reason}" for each in passed_over)
    raise CheckpointError(
        f"no checkpoint in {folder} can be continued from:\n{reasons}\n"
        "Put a copy of one back, or start again in another run.output_dir (run.overwrite = true moves this run aside). "
        "checkpoint.accept_unverified = true takes a checkpoint without manifest as it is"
    )


def _why_unusable(checkpoint: Path, *, accept_unverified: bool) -> tuple[str, str] | None:
    """Kind and reason; None when the run can continue from it. A collective of all ranks."""
    from megatron_dppo.mcore.checkpoint.save_load import NO_MANIFEST, find_damage, read_state

    damage = find_damage(checkpoint)
    if damage and not (damage == NO_MANIFEST and accept_unverified):
        return "damaged", damage
    try:
        state = read_state(checkpoint)
    except CheckpointError as error:
        return "damaged", str(error)
    if missing := [key for key in ("identity", "layout", "config", "step", "stream") if key not in state]:
        return "damaged", f"state.json has no {missing[0]!r}"
    if state.get("finite", True) is not True:
        return "nonfinite", "its weights or optimizer state are not finite"
    return None
