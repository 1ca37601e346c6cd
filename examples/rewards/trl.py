"""A reward in the form of TRL (``GRPOTrainer(reward_funcs=...)``): lists for the batch, data columns as keywords."""

from __future__ import annotations

from typing import Any

from megatron_dppo.rewards import extract_answer


def reward(prompts: list[Any], completions: list[Any], label: list[str], **columns: Any) -> list[float]:
    """Return 1 for each right answer."""
    # The completion of a chat is a list with one message, as in TRL.
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(extract_answer(text) == wanted) for text, wanted in zip(texts, label, strict=True)]
