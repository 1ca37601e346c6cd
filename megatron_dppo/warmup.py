"""A short supervised phase that turns random weights into a base model worth post-training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config import Config
from megatron_dppo.data.supervised import SupervisedDataset
from megatron_dppo.losses import SUPERVISED

if TYPE_CHECKING:
    from megatron_dppo.trainer import PolicyTrainer

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
    """Whether ``folder`` holds the result of exactly this warm-up."""
    marker = folder / MARKER
    return marker.is_file() and json.loads(marker.read_text())["identity"] == warmup_identity(config)


def mark_warm(folder: Path, config: Config) -> None:
    """Remember which warm-up made the weights in ``folder``."""
    (folder / MARKER).write_text(json.dumps({"identity": warmup_identity(config)}) + "\n")


def run_warmup(
    trainer: PolicyTrainer, data: SupervisedDataset, config: Config, report: Callable[[int, float], None]
) -> None:
    """``config.warmup.num_steps`` supervised updates; every data-parallel rank takes its share of each batch.

    Args:
        trainer: a trainer whose optimizer has the warm-up's schedule.
        data: the stream of samples.
        config: the run's configuration.
        report: gets the step and its loss.
    """
    layout, budget, batch = trainer.layout, config.train.micro_batch_tokens, config.warmup.batch_size
    share = batch // layout.dp
    for step in range(config.warmup.num_steps):
        first = step * batch + trainer.dp_rank * share
        samples = [data[i] for i in range(first, first + share)]
        trainer.optimizer.set_step(step)
        result = trainer.update(trainer.pack(samples, budget).batches, SUPERVISED)
        report(step, result.metrics["loss"])
