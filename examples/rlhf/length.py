"""A reward of one's own beside a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cut_off(*, completion: str, metadata: Mapping[str, Any]) -> float:
    """1 for a response that reached ``rollout.max_new_tokens``, else 0; its weight makes it a punishment."""
    del completion
    return float(metadata["finish_reason"] == "length")
