"""A reward in the form of slime (``--custom-rm-path``): one sample, or all samples in a list."""

from __future__ import annotations

from typing import Any

from megatron_dppo.rewards import extract_answer


async def reward(args: Any, sample: Any, **kwargs: Any) -> dict[str, float]:
    """Return score 1 for a right answer, unless the response was truncated."""
    answered = extract_answer(sample.response)
    right = answered == sample.label and sample.status.value == "completed"
    return {
        "score": float(right),
        "answered": float(answered is not None),
        "steps": float(sample.response.count("=")),
    }


async def batched_reward(args: Any, samples: list[Any], **kwargs: Any) -> list[dict[str, float]]:
    """Return the rewards of a batch."""
    return [await reward(args, sample, **kwargs) for sample in samples]
