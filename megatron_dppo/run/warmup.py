"""Short supervised phase that turns random weights into a base model for post-training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.run import CheckpointConfig
from megatron_dppo.config.train import WarmupConfig
from megatron_dppo.data.supervised import SupervisedDataset
from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import read_regular_file, write_synced
from megatron_dppo.losses import SUPERVISED
from megatron_dppo.mcore.checkpoint.folder import step_number
from megatron_dppo.parallel.objects import broadcast_object
from megatron_dppo.process.save_timer import SaveTimer
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.setup.changes import default_values
from megatron_dppo.setup.contents import Contents, flatten, read_contents, same_value
from megatron_dppo.setup.starts import read_starts

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

MARKER = "warmup.json"
_UNFINISHED = "warmup"
"""Folder of an interrupted warm-up among the checkpoints of the run."""


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Settings that the warmed-up weights depend on, except the number of ranks."""

    model: ModelConfig
    settings: WarmupConfig
    seed: int
    micro_batch_tokens: int
    """Token budget of one packed micro-batch."""

    @property
    def identity(self) -> str:
        """The settings as text. Weights with another identity are not reused."""
        parts = {
            "model": self.model.model_dump(),
            "warmup": self.settings.model_dump(),
            "seed": self.seed,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        return json.dumps(parts, sort_keys=True)


def is_warm(folder: Path, warmup: Warmup) -> bool:
    """Return True if ``folder`` holds the result of exactly this warm-up.

    Raises:
        CheckpointError: The marker of a finished warm-up cannot be read.
    """
    try:
        marker = json.loads(read_regular_file(folder / MARKER))
        identity = marker["identity"]
        contents = marker.get("contents", {})
        if not isinstance(identity, str) or not all(isinstance(files, dict) for files in contents.values()):
            raise TypeError("identity is no text, or contents is no table of tables")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / MARKER} cannot be read ({type(error).__name__}: {error}): expected the marker of a finished "
            f"warm-up. Restore a copy of it, or delete {folder} to run the warm-up again"
        ) from error
    return _is_same(identity, warmup.identity, _started_in(folder.parent), contents)


def _is_same(old: str, new: str, folder: Path, contents: Contents) -> bool:
    """Return True if two identities agree, however their paths are spelled and wherever their files are.

    Args:
        old: Identity of a warm-up so far.
        new: Identity of this start's.
        folder: Folder that relative paths of ``old`` start at.
        contents: Files of ``old``.
    """
    if old == new:
        return True
    try:
        before = dict(flatten(json.loads(old)))
    except (ValueError, AttributeError):
        return False
    now = dict(flatten(json.loads(new)))
    # An older version did not know the keys that are newer, and did what their defaults do.
    before = {key: value for key, value in default_values().items() if key in now} | before
    if before.keys() != now.keys():
        return False
    here = read_contents(json.loads(new)).contents
    return all(same_value(before[key], now[key], folder, contents.get(key), here.get(key)) for key in now)


def _started_in(run_folder: Path) -> Path:
    """Return the working directory of the first start of a run. This one's if it has no record yet."""
    starts = read_starts(run_folder)
    return Path(starts[0].get("cwd", "")) if starts else Path()


def mark_warm(folder: Path, warmup: Warmup, checkpoints: Path) -> None:
    """Write the marker of a finished warm-up, and remove the checkpoint of an interrupted one.

    Args:
        folder: Folder of the warmed-up weights.
        warmup: Finished warm-up.
        checkpoints: Folder of the run's checkpoints.
    """
    marker = {"identity": warmup.identity, "contents": read_contents(json.loads(warmup.identity)).contents}
    write_synced(folder / MARKER, json.dumps(marker) + "\n")
    shutil.rmtree(checkpoints / _UNFINISHED, ignore_errors=True)


def run_warmup(
    trainer: PolicyTrainer,
    data: SupervisedDataset,
    warmup: Warmup,
    *,
    checkpoints: Path,
    resume: CheckpointConfig,
    report: Callable[[int, float], None],
    stop: StopSignal,
) -> None:
    """Run ``warmup.num_steps`` supervised updates. Every data-parallel rank trains on its part of each batch.

    Args:
        trainer: Trainer whose optimizer has the schedule of the warm-up.
        data: Stream of samples.
        warmup: Warm-up to run.
        checkpoints: Folder of the run's checkpoints.
        resume: Settings for saves by time, for an interrupted warm-up, and for unverified checkpoints.
        report: Called with the step and its loss.
        stop: Stop signal. It ends the warm-up after a step, from which the same command resumes. It stays deferring
            after the warm-up, which would be lost before the weights are exported.

    Raises:
        Stopped: The warm-up ended after a stop signal.
    """
    batch = warmup.settings.batch_size
    share = batch // trainer.layout.dp
    num_steps = warmup.settings.num_steps
    folder = checkpoints / _UNFINISHED
    state = _state(trainer, warmup)
    # From here on a signal ends the warm-up only between two steps.
    stop.deferring = True
    timer = SaveTimer(resume.save_every_minutes)
    for step in range(_resume(trainer, folder, state, resume), num_steps):
        first = step * batch + trainer.dp_rank * share
        samples = [data[i] for i in range(first, first + share)]
        PROGRESS.enter("warm-up", step)
        trainer.optimizer.set_step(step)
        result = trainer.update(trainer.pack(samples, warmup.micro_batch_tokens).batches, SUPERVISED)
        report(step, result.metrics["loss"])
        # Clocks differ, and a save is a collective: rank 0 decides for all.
        if broadcast_object(timer.is_due, trainer.groups.world) and step + 1 < num_steps:
            with PROGRESS.part("save"), timer.measure(by_time=True):
                trainer.save(folder, step + 1, state, keep=1)
        if stop.requested():
            trainer.save(folder, step + 1, state, keep=1)
            raise Stopped(
                f"by {stop.name} after step {step + 1} of {num_steps} of the warm-up; run the same command to resume it"
            )
    PROGRESS.enter("start", 0)


def _state(trainer: PolicyTrainer, warmup: Warmup) -> dict[str, str]:
    return {"warmup": warmup.identity, "layout": f"{trainer.layout} of {trainer.layout.world_size} ranks"}


def _resume(trainer: PolicyTrainer, folder: Path, expected: Mapping[str, str], resume: CheckpointConfig) -> int:
    """Load an interrupted warm-up and return the number of its steps; a collective of all ranks.

    Args:
        trainer: Gets its state.
        folder: Where it was saved.
        expected: ``_state`` of this warm-up. A saved warm-up with another state is not resumed.
        resume: ``never`` resumes nothing.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    from megatron_dppo.mcore.checkpoint.save_load import NO_MANIFEST, checkpoints, find_damage, read_state

    if resume.resume == "never":
        return 0
    saved = broadcast_object(lambda: checkpoints(folder), trainer.groups.world)
    if not saved:
        return 0
    newest = saved[-1]
    damage = find_damage(newest)
    if damage and not (damage == NO_MANIFEST and resume.accept_unverified):
        raise CheckpointError(
            f"{newest}, the checkpoint of an interrupted warm-up, is damaged: {damage}. Restore a copy of it, or "
            f"delete {newest.parent} to start the warm-up at step 0"
        )
    state = read_state(newest)
    if state.get("layout") != expected["layout"]:
        return 0
    if not _is_same(str(state.get("warmup")), expected["warmup"], Path(), {}):
        return 0
    trainer.load(newest)
    return step_number(newest)
