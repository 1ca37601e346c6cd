"""Agreement of two programs on the probabilities of the same tokens, and explanations of a difference. NumPy only.

Rounding in half precision moves the logits, and so the log-odds of every token, by about the same amount, while
log-probabilities move with 1 - p. A confident policy therefore hides a wrong temperature or a shift by one token in the
mean of |log p - log q|. And one token that went to another expert dominates this mean. The median difference of the
log-odds shows both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_CERTAIN = 1e-6
"""Smallest 1 - p: below it, float32 log-probabilities are noise."""
_UNCERTAIN = np.log1p(-1e-3)
"""Log-probability below which a token counts in the median; above it, log-odds need more digits than a server sends."""
_MIN_TOKENS = 6
"""Fewest such tokens for a result."""
_MAX_EXPLAINED = 0.4
"""Largest median difference of the log-odds that counts as explained: twice what bf16 caused in any model."""
_GRID_TOLERANCE = 0.01
"""Largest distance from a multiple of the rounding step, in steps; 2 % of unrounded values are as close."""


class Distance(NamedTuple):
    """Distance of reported from computed log-probabilities; NaN if one of them is not a number."""

    mean: float
    """Mean |log p - log q|, in nats."""
    largest: float
    """Largest |log p - log q| of one token, in nats."""
    probability: float
    """Mean |p - q|, which the losses depend on."""
    odds: float
    """Median |log-odds p - log-odds q| of the uncertain tokens; 0 if there are too few."""


class Explanation(NamedTuple):
    """Another meaning of the reported numbers that fits them better."""

    name: str
    """``raw``, ``next``, ``previous`` (token), ``scaled`` or ``offset``."""
    odds: float
    """``Distance.odds`` under this meaning."""
    factor: float = 1.0
    offset: float = 0.0
    """Nats that ``offset`` adds to every token: a filter that allows a part of the probability, or a constant."""
    other_odds: float = float("inf")
    """``odds`` of the other one of ``scaled`` and ``offset``."""


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress NumPy warnings about invalid numbers of a server, such as infinities.

    The result is NaN or infinite then, which exceeds every bound that the caller compares it with.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        yield


@_quietly()
def distance(reported: Array, computed: Array) -> Distance:
    """Return the distance of log-probabilities of the same tokens, of any shape, at least one."""
    difference = np.abs(reported - computed)
    odds = _odds(reported, computed)
    return Distance(
        mean=float(difference.mean()),
        largest=float(difference.max()),
        probability=float(np.abs(np.exp(reported) - np.exp(computed)).mean()),
        odds=0.0 if odds is None else odds,
    )


def log_odds(logprobs: Array) -> Array:
    """Return log(p / (1 - p)), with 1 - p of at least 1e-6."""
    logprobs = np.minimum(logprobs, np.log1p(-_CERTAIN))
    # ``expm1`` keeps the digits of 1 - p where p is close to 1.
    return logprobs - np.log(-np.expm1(logprobs))


def _odds(reported: Array, computed: Array) -> float | None:
    """Return ``Distance.odds``, or None with too few uncertain tokens."""
    # Negated, so that NaN counts as uncertain.
    uncertain = ~(np.minimum(reported, computed) > _UNCERTAIN)
    if uncertain.sum() < _MIN_TOKENS:
        return None
    return float(np.median(np.abs(log_odds(reported[uncertain]) - log_odds(computed[uncertain]))))


@_quietly()
def better_explanation(
    reported: Sequence[Array], computed: Sequence[Array], raw: Sequence[Array], neighbors: Sequence[Array], floor: float
) -> Explanation | None:
    """Return the meaning that explains reported log-probabilities at least twice as well as the expected one, or None.

    ``reported`` has ``[R]`` or ``[R, K]`` of each response, ``computed`` the expected ones, ``raw`` those at
    temperature 1. ``neighbors`` are like ``computed``; their rows are compared for neighboring tokens: a shift must fit
    better than the rows of the tokens themselves. Distances below ``floor`` need no explanation.
    """
    left = _flatten(reported)
    right = _flatten(computed)
    current = _odds(left, right)
    if current is None or not current > floor:
        return None
    factor = _scale_factor(left, right)
    candidates = [
        Explanation("raw", _or_infinity(_odds(left, _flatten(raw)))),
        Explanation("next", _or_infinity(_shifted_odds(reported, neighbors, 1))),
        Explanation("previous", _or_infinity(_shifted_odds(reported, neighbors, -1))),
        Explanation("scaled", _or_infinity(_odds(left, right * factor)), factor),
    ]
    best = min(candidates, key=attrgetter("odds"))
    if best.name in ("next", "previous"):
        current = min(current, _or_infinity(_odds(left, _flatten(neighbors))))
    if best.name == "scaled":
        # Where all tokens are about equally probable, one factor and one offset hardly differ.
        shift = float(np.median(left - right))
        offset = Explanation("offset", _or_infinity(_odds(left, right + shift)), offset=shift)
        best, other = sorted((best, offset), key=attrgetter("odds"))
        best = best._replace(other_odds=other.odds)
    return best if best.odds < min(current / 2, _MAX_EXPLAINED) else None


@_quietly()
def decimals(reported: Array, computed: Array) -> int | None:
    """Return the number of decimals, at most 3, that reported numbers are rounded to; None if nothing shows it."""
    for count in range(4):
        steps = reported * 10.0**count
        # Numbers near 0 are multiples of any step.
        is_telling = np.abs(computed) * 10.0**count > 5 * _GRID_TOLERANCE
        is_on_grid = np.abs(steps - np.round(steps)) < _GRID_TOLERANCE
        if is_telling.sum() >= _MIN_TOKENS and bool(is_on_grid.all()):
            return count
    return None


@_quietly()
def missing_from_best(computed: Array, best: Array) -> float:
    """Return how far the ids of a server's Top-K fall short of the trainer's own Top-K, in nats on average.

    Both are the trainer's log-probabilities ``[R, K]``: at the server's ids, and the best. Ties, and ids that are equal
    except for rounding, make no difference.
    """
    return float((np.sort(best, 1) - np.sort(computed, 1)).mean())


def _scale_factor(reported: Array, computed: Array) -> float:
    """Return the median ratio of reported to computed numbers."""
    is_usable = (computed < _UNCERTAIN) & (reported < 0) & np.isfinite(reported)
    return float(np.median(reported[is_usable] / computed[is_usable])) if is_usable.any() else 1.0


def _shifted_odds(reported: Sequence[Array], neighbors: Sequence[Array], by: int) -> float | None:
    """Return the distance if each number belonged to the token ``by`` (1 or -1) positions later."""
    first, last = (slice(None, -1), slice(1, None)) if by > 0 else (slice(1, None), slice(None, -1))
    return _odds(_flatten([r[first] for r in reported]), _flatten([n[last] for n in neighbors]))


def _flatten(parts: Sequence[Array]) -> Array:
    return np.concatenate([part.ravel() for part in parts])


def _or_infinity(odds: float | None) -> float:
    return float("inf") if odds is None or np.isnan(odds) else odds
