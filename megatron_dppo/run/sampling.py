"""How the sections of a configuration say that answers are sampled, and by which seed."""

from __future__ import annotations

import random
from typing import Any

from megatron_dppo.config.data import RolloutConfig
from megatron_dppo.config.evaluation import EvalConfig
from megatron_dppo.types import SamplingParams


def sampling_params(
    settings: RolloutConfig | EvalConfig, max_new_tokens: int, seed: int, **recorded: Any
) -> SamplingParams:
    """By ``[rollout]`` or ``[eval]``; ``recorded`` says what is reported beside tokens and log-probabilities."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=seed,
        **recorded,
    )


def sampling_seed(seed: int, purpose: str, step: int, dp_rank: int) -> int:
    """A seed for a step and a data-parallel rank, a function of the run's seed alone (so that resume is exact).

    Args:
        seed: ``run.seed``.
        purpose: different draws of one step have different names.
        step: the rollout step.
        dp_rank: data-parallel rank.
    """
    return random.Random(f"{seed}/{purpose}/{step}/{dp_rank}").getrandbits(31)
