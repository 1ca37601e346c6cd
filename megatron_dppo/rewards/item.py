"""What is scored, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One completion, with everything that a reward function of any signature may ask for."""

    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    completion: str
    """The response without special tokens."""
    label: str
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data row and ``finish_reason`` (``stop`` or ``length``)."""
    token_ids: Sequence[int] = ()
    """[R] the response's tokens, the end-of-sequence token included."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The prompt's chat messages; None when the row has a plain string."""

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off at its longest length."""
        return self.metadata.get("finish_reason") == "length"


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A reward, or why there is none."""

    reward: float
    """What training uses: the score with its shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """``score`` (without shaping), the function's own parts and the shaping's; empty for a plain number unshaped."""
    failed: bool = False
    error: str = ""
    eval_score: float | None = None
    """What an evaluation counts, where one of several functions is marked for it; None = the unshaped score."""
