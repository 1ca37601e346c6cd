"""verl's form, as for ``custom_reward_function.path``. Parts that are not numbers (``pred``) are not logged."""

from __future__ import annotations

from typing import Any

from megatron_dppo.rewards import extract_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A right answer scores 1."""
    answered = extract_answer(solution_str)
    return {
        "score": float(answered == ground_truth),
        "answered": answered is not None,
        "steps": solution_str.count("="),
        "pred": answered,
    }
