"""Counts of what a run's mask removed: by kind of token, by sign of the advantage, by age, and against other losses.

All counts are over tokens of the loss mask with an advantage. They add up over steps.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.report.steps.tokens import UNKNOWN_AGE, Decode, StepTokens

OtherMasks = Callable[[StepTokens], Mapping[str, NDArray[np.bool_]]]
"""Function that returns which tokens ``[N]`` each other loss would have masked."""
ENDS = 3
"""Number of tokens at both ends of a response that count as first and last tokens."""
KINDS = ("end token", "first tokens", "last tokens", "digits", "words", "format", "not decoded")
"""Kinds of tokens; a token is of the first that fits. ``format`` is markup (a backslash, a brace, a
bracket), and text without a letter or a digit."""
_END_REASON = "stop"
_MAX_AGE_ROWS = 24


@dataclass
class MaskCounts:
    """Counts of one run. Each value is ``[masked, all]``."""

    kinds: dict[str, list[int]] = field(default_factory=dict)
    """By kind and sign, such as ``digits +``."""
    ages: dict[int, list[int]] = field(default_factory=dict)
    """By the age of the token in updates."""
    gradient: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sums of |A| min(r, C), the size of a token's gradient by its log-probability."""
    other_losses: dict[str, list[int]] = field(default_factory=dict)
    """By loss: tokens that it would have masked, and those of them that the run masked too."""
    masked: int = 0
    tokens: int = 0

    def add(self, step: StepTokens, decode: Decode | None, cap: float, other_masks: OtherMasks | None) -> None:
        """Add the tokens of a step.

        Without ``decode`` tokens have kinds by position only. ``cap`` is C of the loss's weight; infinity without one.
        """
        acts = step.trained & (step.advantages != 0)
        self.masked += int((step.masked & acts).sum())
        self.tokens += int(acts.sum())
        signs = np.where(step.advantages > 0, " +", " -")
        names = np.char.add(token_kinds(step, decode), signs)
        _count(self.kinds, names[acts], step.masked[acts])
        _count(self.ages, step.ages[acts], step.masked[acts])
        known = acts & (step.mu > 0)
        ratio = np.minimum(step.pi[known].astype(float) / step.mu[known], cap)
        sizes = np.abs(step.advantages[known]) * ratio
        self.gradient[0] += float(sizes[step.masked[known]].sum())
        self.gradient[1] += float(sizes.sum())
        for name, mask in ({} if other_masks is None else other_masks(step)).items():
            entry = self.other_losses.setdefault(name, [0, 0])
            entry[0] += int((mask & acts).sum())
            entry[1] += int((mask & acts & step.masked).sum())

    def view(self) -> dict[str, object] | None:
        """Return the data of the page; None without tokens."""
        if not self.tokens:
            return None
        kinds = [
            [kind, *self.kinds.get(f"{kind} +", [0, 0]), *self.kinds.get(f"{kind} -", [0, 0])]
            for kind in KINDS
            if f"{kind} +" in self.kinds or f"{kind} -" in self.kinds
        ]
        removed, total = self.gradient
        return {
            "masked": self.masked,
            "tokens": self.tokens,
            "kinds": kinds,
            "ages": self._age_rows(),
            "gradient": round(removed / total, 4) if total else None,
            "others": [[name, *counts] for name, counts in self.other_losses.items()],
        }

    def _age_rows(self) -> list[list[object]]:
        """Return ``[ages, masked, all]`` for each age, or range of ages if there are many. Ages None: not recorded."""
        width = max(1, -(-(max(self.ages) + 1) // _MAX_AGE_ROWS))
        ranges: dict[str | None, list[int]] = {}
        for age, counts in sorted(self.ages.items()):
            start = age // width * width
            label = str(age) if width == 1 else f"{start}-{start + width - 1}"
            entry = ranges.setdefault(None if age == UNKNOWN_AGE else label, [0, 0])
            entry[0] += counts[0]
            entry[1] += counts[1]
        return [[label, *counts] for label, counts in ranges.items()]


def token_kinds(step: StepTokens, decode: Decode | None) -> NDArray[np.str_]:
    """Return the kind of each token, [N] of ``KINDS``."""
    unique, index = np.unique(step.ids, return_inverse=True)
    texts = None if decode is None else decode(unique.tolist())
    by_id = ["not decoded"] * len(unique) if texts is None else [_kind(text) for text in texts]
    kinds = np.array(by_id, dtype="U16")[index] if len(unique) else np.empty(0, dtype="U16")
    for row, begin, end in zip(step.rows, step.starts[:-1], step.starts[1:], strict=True):
        kinds[max(begin, end - ENDS) : end] = "last tokens"
        kinds[begin : min(end, begin + ENDS)] = "first tokens"
        if end > begin and row["finish_reason"] == _END_REASON:
            kinds[end - 1] = "end token"
    return kinds


def _kind(text: str) -> str:
    if re.search(r"[\\{}<>\[\]]", text):
        return "format"
    if re.search(r"\d", text):
        return "digits"
    return "words" if re.search(r"[^\W\d_]", text) else "format"


def _count(counts: dict[Any, list[int]], keys: NDArray[Any], masked: NDArray[np.bool_]) -> None:
    distinct, index = np.unique(keys, return_inverse=True)
    totals = np.bincount(index)
    removed = np.bincount(index[masked], minlength=len(distinct))
    for key, part, total in zip(distinct.tolist(), removed.tolist(), totals.tolist(), strict=True):
        entry = counts.setdefault(key, [0, 0])
        entry[0] += part
        entry[1] += total
