"""A custom reward combined with a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cut_off(*, completion: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 for a response that reached ``rollout.max_new_tokens``, else 0. Its weight is negative."""
    del completion
    return float(metadata["finish_reason"] == "length")
