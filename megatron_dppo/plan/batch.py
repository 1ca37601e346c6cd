"""The batch arithmetic of a step, with the micro-batches that full-length responses make."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step."""

    samples: int
    """of all ranks"""
    samples_per_update: int
    """of one data-parallel rank"""
    updates: int
    """a step"""
    mean_tokens: int
    """of a sample: an assumption"""
    micro_batches: int
    """of one update on one rank"""


MEAN_LENGTH = 0.4
"""An assumption: tokens of a mean response over ``max_new_tokens`` (the 30B recipe's 6k of 16k)."""


def batch_of(config: Config, layout: Layout) -> Batch:
    """Of mean responses ``MEAN_LENGTH`` times as long as allowed, behind the longest prompts, in full rows."""
    rollout, train = config.rollout, config.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    each = samples // layout.dp // train.mini_batches
    mean = config.data.max_prompt_tokens // 4 + round(MEAN_LENGTH * rollout.max_new_tokens)
    count = -(-each * mean // train.micro_batch_tokens)
    multiple = layout.micro_batch_multiple
    return Batch(
        samples=samples,
        samples_per_update=each,
        updates=train.mini_batches * train.epochs,
        mean_tokens=mean,
        micro_batches=-(-count // multiple) * multiple,
    )
