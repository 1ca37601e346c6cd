"""Changes that a gateway could make to the responses of a real SGLang server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.engines.proxy import Exchange, Lie
from tests.engines.tiny import LAYERS, TOP_K

Meta = dict[str, Any]
_VALUES, _IDS = "output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"


def telling(change: Callable[[Meta], None], *, but: str | None = None) -> Lie:
    """A lie about ``meta_info`` of every response.

    Args:
        change: alters it in place.
        but: requests with this in their id are answered truly.
    """

    def lie(exchange: Exchange) -> None:
        if exchange.path == "/generate" and (but is None or but not in exchange.request["rid"]):
            change(exchange.answer["meta_info"])

    return lie


def logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Meta], None]:
    """The sampled tokens' log-probabilities ``[R]``."""

    def apply(meta: Meta) -> None:
        rows = meta["output_token_logprobs"]
        for row, value in zip(rows, change(np.array([row[0] for row in rows])).tolist(), strict=True):
            row[0] = value

    return apply


def topk(change: Callable[[np.ndarray], np.ndarray], *names: str) -> Callable[[Meta], None]:
    """Top-K ``[R, K]``: ``values``, ``ids`` or both."""

    def apply(meta: Meta) -> None:
        for name in names:
            key, dtype = {"values": (_VALUES, "<f4"), "ids": (_IDS, "<i4")}[name]
            array = np.frombuffer(base64.b64decode(meta[key]), dtype).reshape(meta["output_top_logprobs_shape"])
            meta[key] = base64.b64encode(change(array).astype(dtype).tobytes()).decode()

    return apply


def routes(change: Callable[[np.ndarray], np.ndarray], layers: int = LAYERS, k: int = TOP_K) -> Callable[[Meta], None]:
    """Routed experts ``[tokens, L, k]``."""

    def apply(meta: Meta) -> None:
        if "routed_experts" not in meta:
            return  # not asked for, as in an evaluation
        array = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, layers, k)
        meta["routed_experts"] = base64.b64encode(change(array).astype("<i4").tobytes()).decode()

    return apply


def next_one(rows: np.ndarray) -> np.ndarray:
    """Each row is that of the next token; the last one stays."""
    return np.concatenate([rows[1:], rows[-1:]])
