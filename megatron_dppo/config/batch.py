"""Batch sizes of a step, collected from several sections."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples and optimizer updates per step."""

    prompts_per_step: int
    """Prompts of one rollout step, over all ranks."""
    samples_per_prompt: int
    """Responses sampled for each prompt."""
    mini_batches: int
    """Optimizer updates per epoch."""
    epochs: int
    """Passes over the samples of one step."""
    num_steps: int
    """Rollout steps of the run."""
