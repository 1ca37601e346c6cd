"""A language model as a table: which token, log-probability, Top-K and experts follow from weights and prefix.

Every column is a pure function of (digest of the weights, tokens before), so that the oracle can tell for each number
that would train whether it is exactly that of the weights which the trainer believes in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

VOCABULARY, END = 16, 2
LAYERS, EXPERTS, CHOSEN = 2, 8, 2
_BITS = 12
_ROWS, _DRAWS = 1 << _BITS, 256
_MASK = (1 << 64) - 1


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1.5, (_ROWS, VOCABULARY))
    logits[:, END] += 0.5
    logits[:, :END] = -40.0  # padding and begin are never sampled
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    cumulative = np.exp(logprobs).cumsum(1)
    draws = (np.arange(_DRAWS) + 0.5) / _DRAWS
    tokens = (draws[None, :, None] > cumulative[:, None, :]).sum(2).clip(0, VOCABULARY - 1)
    ids = np.argsort(-logprobs, axis=1, kind="stable").astype(np.int32)
    experts = np.argsort(rng.random((_ROWS, LAYERS, EXPERTS)), axis=2)[..., :CHOSEN].astype(np.int32)
    return logprobs.astype(np.float32), ids, tokens, experts


LOGPROBS, RANKED, _TOKENS, ROUTES = _tables()
"""[rows, V] float32; [rows, V] ids by rank; [rows, draws] sampled token; [rows, L, k] experts"""
RANKED_LOGPROBS = np.take_along_axis(LOGPROBS, RANKED, 1)
_LOGPROBS: list[list[float]] = LOGPROBS.tolist()
_SAMPLED: list[list[int]] = _TOKENS.tolist()

_STEP, _ADD, _MIX = 6364136223846793005, 1442695040888963407, 0x9E3779B97F4A7C15


def prefix_hash(tokens: Sequence[int], start: int = 7) -> int:
    """The state after reading tokens, from the state ``start``."""
    for token in tokens:
        start = (start * _STEP + token * _MIX + _ADD) & _MASK
    return start


def row_of(state: int, digest: int) -> int:
    """The row of the tables for the weights ``digest`` in a state."""
    return (((state ^ digest) * _MIX) & _MASK) >> (64 - _BITS)


def rows_of(tokens: Sequence[int], digest: int) -> list[int]:
    """The row after each of the tokens: what follows token i, and the experts that read token i."""
    state, rows = 7, []
    for token in tokens:
        state = (state * _STEP + token * _MIX + _ADD) & _MASK
        rows.append((((state ^ digest) * _MIX) & _MASK) >> (64 - _BITS))
    return rows


def sample(prefix: Sequence[int], digest: int, seed: int, limit: int, stop: Sequence[int]) -> list[int]:
    """New tokens after ``prefix``, up to a stop token or the limit."""
    state, tokens = prefix_hash(prefix), list[int]()
    draw = (seed * _MIX + len(prefix)) & _MASK
    while len(tokens) < limit:
        draw = (draw * _STEP + _ADD) & _MASK
        token = _SAMPLED[row_of(state, digest)][draw >> 56]
        tokens.append(token)
        if token in stop:
            break
        state = (state * _STEP + token * _MIX + _ADD) & _MASK
    return tokens


def logprobs_of(rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token at its row, float32."""
    return [_LOGPROBS[row][token] for row, token in zip(rows, tokens, strict=True)]


def digest_of(weights: Mapping[str, bytes]) -> int:
    """A number that stands for the content of weights, 64 bits."""
    return _digest(tuple(sorted(weights.items())))


@lru_cache(4096)
def _digest(items: tuple[tuple[str, bytes], ...]) -> int:
    text = hashlib.blake2b(digest_size=8)
    for name, data in items:
        text.update(name.encode() + b"=" + data + b";")
    return int.from_bytes(text.digest(), "little")
