"""How well two programs agree on the probabilities of the same tokens, and what explains a difference; plain numbers.

Rounding in half precision moves the logits, and so the log-odds of every token, by about the same, while
log-probabilities move with 1 - p. So a confident policy hides a wrong temperature, or a wrong place, in the mean of
|log p - log q|, and one token that went to another expert dominates that mean. The median difference of the log-odds is
blind to neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_CERTAIN = 1e-6
"""Below this rest of probability float32 log-probabilities are noise."""
_UNCERTAIN = np.log1p(-1e-3)
"""Tokens of a lower log-probability count in the median: the others' log-odds need more digits than a server sends."""
_FEW = 6
"""Fewer such tokens tell nothing."""
_FITS = 0.4
"""Median difference of the log-odds up to which numbers are explained at all; twice what bf16 did to any model."""
_ON_GRID = 0.01
"""Distance from a multiple of the step, in steps: of true values 2 % are as near."""


class Distance(NamedTuple):
    """Of reported from computed log-probabilities; NaN where one of them is not a number."""

    mean: float
    """mean |log p - log q|, in nats"""
    largest: float
    """of one token"""
    probability: float
    """mean |p - q|: what the losses see"""
    odds: float
    """median |log-odds p - log-odds q| of the uncertain tokens; 0 where there are too few"""


class Explanation(NamedTuple):
    """Another meaning of the reported numbers, which fits them better."""

    name: str
    """``raw``, ``next``, ``previous`` (token) or ``scaled``"""
    odds: float
    """``Distance.odds`` from it"""
    factor: float = 1.0
    """that they are scaled by"""


@contextmanager
def _quietly() -> Iterator[None]:
    """No warning where a number that a server made up is subtracted from its like or is too large to add: the result
    is NaN or infinite, and that is what the caller compares with its bounds, which neither keeps."""
    with np.errstate(invalid="ignore", over="ignore"):
        yield


@_quietly()
def distance(reported: Array, computed: Array) -> Distance:
    """Of log-probabilities of the same tokens, of any shape, at least one."""
    difference = np.abs(reported - computed)
    odds = _odds(reported, computed)
    return Distance(
        mean=float(difference.mean()),
        largest=float(difference.max()),
        probability=float(np.abs(np.exp(reported) - np.exp(computed)).mean()),
        odds=0.0 if odds is None else odds,
    )


def log_odds(logprobs: Array) -> Array:
    """log(p / (1 - p)), with 1 - p of 1e-6 at least."""
    logprobs = np.minimum(logprobs, np.log1p(-_CERTAIN))
    return logprobs - np.log(-np.expm1(logprobs))


def _odds(reported: Array, computed: Array) -> float | None:
    """``Distance.odds``; None = too few uncertain tokens."""
    uncertain = ~(np.minimum(reported, computed) > _UNCERTAIN)  # what is not a number counts
    if uncertain.sum() < _FEW:
        return None
    return float(np.median(np.abs(log_odds(reported[uncertain]) - log_odds(computed[uncertain]))))


@_quietly()
def better_explanation(
    reported: Sequence[Array], computed: Sequence[Array], raw: Sequence[Array], places: Sequence[Array], floor: float
) -> Explanation | None:
    """What explains reported log-probabilities, and at least twice as well as that they are right; None = nothing does.

    Args:
        reported: of each response, ``[R]`` or ``[R, K]``.
        computed: the right ones.
        raw: those at temperature 1.
        places: like ``computed``, of which the rows of neighbouring tokens are compared, if they fit better than those
            of the tokens themselves do.
        floor: distances below it need no explanation.
    """
    left, right = _flat(reported), _flat(computed)
    own = _odds(left, right)
    if own is None or not own > floor:
        return None
    factor = _factor(left, right)
    found = [
        Explanation("raw", _known(_odds(left, _flat(raw)))),
        Explanation("next", _known(_shifted(reported, places, 1))),
        Explanation("previous", _known(_shifted(reported, places, -1))),
        Explanation("scaled", _known(_odds(left, right * factor)), factor),
    ]
    best = min(found, key=lambda explanation: explanation.odds)
    if best.name in ("next", "previous"):
        own = min(own, _known(_odds(left, _flat(places))))
    return best if best.odds < min(own / 2, _FITS) else None


@_quietly()
def decimals(reported: Array, computed: Array) -> int | None:
    """To how many decimals, at most 3, the reported numbers are rounded; None = they are not, or too few tell."""
    for count in range(4):
        steps, told = reported * 10.0**count, np.abs(computed) * 10.0**count > 5 * _ON_GRID
        if told.sum() >= _FEW and bool((np.abs(steps - np.round(steps)) < _ON_GRID).all()):
            return count
    return None


@_quietly()
def missing_from_best(computed: Array, best: Array) -> float:
    """By how much, on average, the trainer's log-probabilities ``[R, K]`` at a server's Top-K ids are below its own
    Top-K. Ties and what is equal but for rounding make no difference."""
    return float((np.sort(best, 1) - np.sort(computed, 1)).mean())


def _factor(reported: Array, computed: Array) -> float:
    """By which most of the reported numbers are the computed ones."""
    usable = (computed < _UNCERTAIN) & (reported < 0) & np.isfinite(reported)
    return float(np.median(reported[usable] / computed[usable])) if usable.any() else 1.0


def _shifted(reported: Sequence[Array], places: Sequence[Array], by: int) -> float | None:
    """The distance if each number belonged to the token ``by`` (1 or -1) places further on."""
    first, last = (slice(None, -1), slice(1, None)) if by > 0 else (slice(1, None), slice(None, -1))
    return _odds(_flat([r[first] for r in reported]), _flat([p[last] for p in places]))


def _flat(parts: Sequence[Array]) -> Array:
    return np.concatenate([part.ravel() for part in parts])


def _known(odds: float | None) -> float:
    return float("inf") if odds is None or np.isnan(odds) else odds
