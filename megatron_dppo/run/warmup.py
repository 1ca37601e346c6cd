"""A short supervised phase that turns random weights into a base model worth post-training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config.schema import Config
from megatron_dppo.data.supervised import SupervisedDataset
from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import write_synced
from megatron_dppo.losses import SUPERVISED
from megatron_dppo.mcore.checkpoint.folder import step_of
from megatron_dppo.parallel.objects import from_leader
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.run.stop_signal import Stopped, StopSignal

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

MARKER = "warmup.json"


def warmup_identity(config: Config) -> str:
    """What the warmed-up weights depend on; weights of another identity are not reused."""
    parts = {
        "model": config.model.model_dump(),
        "warmup": config.warmup.model_dump(),
        "seed": config.run.seed,
        "micro_batch_tokens": config.train.micro_batch_tokens,
    }
    return json.dumps(parts, sort_keys=True)


def is_warm(folder: Path, config: Config) -> bool:
    """Whether ``folder`` holds the result of exactly this warm-up.

    Raises:
        CheckpointError: what says so cannot be read.
    """
    try:
        identity = json.loads((folder / MARKER).read_text(encoding="utf-8"))["identity"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / MARKER} cannot be read ({type(error).__name__}: {error}): expected what a finished warm-up has "
            f"written there. Put a copy back, or delete {folder} to warm up again"
        ) from error
    return bool(identity == warmup_identity(config))


def mark_warm(folder: Path, config: Config) -> None:
    """Remember which warm-up made the weights in ``folder``; what an interrupted one had saved is not needed now."""
    write_synced(folder / MARKER, json.dumps({"identity": warmup_identity(config)}) + "\n")
    shutil.rmtree(_unfinished(config), ignore_errors=True)


def run_warmup(
    trainer: PolicyTrainer,
    data: SupervisedDataset,
    config: Config,
    report: Callable[[int, float], None],
    stop: StopSignal,
) -> None:
    """``config.warmup.num_steps`` supervised updates; every data-parallel rank takes its share of each batch.

    Args:
        trainer: a trainer whose optimizer has the warm-up's schedule.
        data: the stream of samples.
        config: the run's configuration.
        report: gets the step and its loss.
        stop: a signal ends the warm-up after a step; the same warm-up then goes on from there. It goes on deferring
            signals afterwards: until the weights are exported, the warm-up would be lost.

    Raises:
        Stopped: after such a signal.
    """
    layout, budget, batch = trainer.layout, config.train.micro_batch_tokens, config.warmup.batch_size
    share, num_steps = batch // layout.dp, config.warmup.num_steps
    stop.deferring = True
    for step in range(_resume(trainer, config), num_steps):
        first = step * batch + trainer.dp_rank * share
        samples = [data[i] for i in range(first, first + share)]
        PROGRESS.enter("warm-up", step)
        trainer.optimizer.set_step(step)
        result = trainer.update(trainer.pack(samples, budget).batches, SUPERVISED)
        report(step, result.metrics["loss"])
        if stop.requested():
            trainer.save(_unfinished(config), step + 1, _state(trainer, config), keep=1)
            raise Stopped(
                f"by {stop.name} after step {step + 1} of {num_steps} of the warm-up; the same command continues it"
            )
    PROGRESS.enter("start", 0)


def _unfinished(config: Config) -> Path:
    return Path(config.run.output_dir) / "checkpoints" / "warmup"


def _state(trainer: PolicyTrainer, config: Config) -> dict[str, str]:
    return {"warmup": warmup_identity(config), "layout": f"{trainer.layout} of {trainer.layout.world_size} ranks"}


def _resume(trainer: PolicyTrainer, config: Config) -> int:
    """Steps that an interrupted run of exactly this warm-up has done; its state is loaded (a collective of all ranks).

    Raises:
        CheckpointError: it is damaged.
    """
    from megatron_dppo.mcore.checkpoint.save_load import NO_MANIFEST, checkpoints, find_damage, read_state

    if config.checkpoint.resume == "never":
        return 0
    found = from_leader(lambda: checkpoints(_unfinished(config)), trainer.groups.world)
    if not found:
        return 0
    newest = found[-1]
    damage = find_damage(newest)
    if damage and not (damage == NO_MANIFEST and config.checkpoint.accept_unverified):
        raise CheckpointError(
            f"{newest}, where a signal has stopped the warm-up, is damaged: {damage}. Put a copy of it back, or delete "
            f"{newest.parent}: then the warm-up begins again at step 0"
        )
    state = read_state(newest)
    if any(state.get(key) != value for key, value in _state(trainer, config).items()):
        return 0
    trainer.load(newest)
    return step_of(newest)
