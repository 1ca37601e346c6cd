"""A reward in the native form: one sample, keyword arguments. Two parts beside the score are logged separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.rewards import extract_answer


def score(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return score 1 for a right answer; ``steps`` counts the equations in the completion."""
    answered = extract_answer(completion)
    return {
        "score": float(answered == label),
        "answered": float(answered is not None),
        "steps": float(completion.count("=")),
    }
