"""The sizes that a step's samples and a warm-up's batches have, from several sections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples of a step, its optimizer updates, and the batch of a warm-up."""

    prompts_per_step: int
    samples_per_prompt: int
    mini_batches: int
    """Optimizer updates of an epoch."""
    epochs: int
    num_steps: int
    warmup_batch_size: int | None
    """Sequences of one update of the warm-up; None = there is no warm-up."""
