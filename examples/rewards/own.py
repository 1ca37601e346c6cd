"""Our own form: one sample, by name. Returns the score and two parts that are logged apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.rewards import extract_answer


def score(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """A right answer scores 1; ``steps`` counts the equations that were written on the way."""
    answered = extract_answer(completion)
    return {
        "score": float(answered == label),
        "answered": float(answered is not None),
        "steps": float(completion.count("=")),
    }
