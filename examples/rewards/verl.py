"""A reward in the form of verl (``custom_reward_function.path``). Non-numeric parts (``pred``) are not logged."""

from __future__ import annotations

from typing import Any

from megatron_dppo.rewards import extract_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return score 1 for a right answer."""
    answered = extract_answer(solution_str)
    return {
        "score": float(answered == ground_truth),
        "answered": answered is not None,
        "steps": solution_str.count("="),
        "pred": answered,
    }
