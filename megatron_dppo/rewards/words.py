"""The reward of the embedded word tasks: the share of words that are right at their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def words_reward(*, prompt: str, completion: str, label: str, metadata: Mapping[str, Any]) -> float:
    """How many of the label's words the response has at the same place, over all of them; what follows is ignored.

    Raises:
        ValueError: the label has no words.
    """
    del prompt, metadata
    got, wanted = completion.split(), label.split()
    if not wanted:
        raise ValueError("reward.function = 'words' needs a label of at least one word")
    return sum(a == b for a, b in zip(got, wanted, strict=False)) / len(wanted)
