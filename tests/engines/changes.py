"""Changes that a gateway could make to the responses of a real SGLang or vLLM server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.engines.proxy import Exchange, Lie
from tests.engines.tiny import LAYERS, TOP_K

Fields = dict[str, Any]
"""The part of a response that describes its tokens: SGLang's ``meta_info``, or the one of vLLM's ``choices``."""
_VALUES, _IDS = "output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"
GENERATE = {"/generate": "rid", "/inference/v1/generate": "request_id"}
"""Calls that sample, with the field of the request's name: SGLang's and vLLM's."""


def samples(exchange: Exchange, *, but: str | None = None) -> bool:
    """Return True for a call that samples, except for requests with ``but`` in their name."""
    name = GENERATE.get(exchange.path)
    return name is not None and (but is None or but not in exchange.request[name])


def telling(change: Callable[[Fields], None], *, but: str | None = None) -> Lie:
    """A lie about the tokens of every response.

    Args:
        change: alters the fields in place.
        but: requests with this in their id are answered truly.
    """

    def lie(exchange: Exchange) -> None:
        if samples(exchange, but=but):
            answer = exchange.answer
            change(answer["meta_info"] if "meta_info" in answer else answer["choices"][0])

    return lie


def logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Fields], None]:
    """The sampled tokens' log-probabilities ``[R]``."""

    def apply(fields: Fields) -> None:
        is_vllm = "logprobs" in fields
        rows = fields["logprobs"]["content"] if is_vllm else fields["output_token_logprobs"]
        key: Any = "logprob" if is_vllm else 0
        for row, value in zip(rows, change(np.array([row[key] for row in rows])).tolist(), strict=True):
            row[key] = value

    return apply


def topk(change: Callable[[np.ndarray], np.ndarray], *names: str) -> Callable[[Fields], None]:
    """SGLang's Top-K ``[R, K]``: ``values``, ``ids`` or both."""

    def apply(fields: Fields) -> None:
        for name in names:
            key, dtype = {"values": (_VALUES, "<f4"), "ids": (_IDS, "<i4")}[name]
            array = np.frombuffer(base64.b64decode(fields[key]), dtype).reshape(fields["output_top_logprobs_shape"])
            fields[key] = base64.b64encode(change(array).astype(dtype).tobytes()).decode()

    return apply


def candidates(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Fields], None]:
    """The log-probabilities of all candidates of a response, in either engine's form.

    Args:
        change: Function of values ``[R, K]``, padded with NaN.
    """

    def apply(fields: Fields) -> None:
        if "logprobs" not in fields:
            topk(change, "values")(fields)
            return
        rows = [entry["top_logprobs"] for entry in fields["logprobs"]["content"]]
        values = np.full((len(rows), max(map(len, rows))), np.nan)
        for index, row in enumerate(rows):
            values[index, : len(row)] = [candidate["logprob"] for candidate in row]
        for row, changed in zip(rows, change(values).tolist(), strict=True):
            for candidate, value in zip(row, changed, strict=False):
                candidate["logprob"] = value

    return apply


def routes(
    change: Callable[[np.ndarray], np.ndarray], layers: int = LAYERS, k: int = TOP_K
) -> Callable[[Fields], None]:
    """Routed experts ``[tokens, L, k]``."""

    def apply(fields: Fields) -> None:
        if "routed_experts" not in fields:
            return  # not asked for, as in an evaluation
        array = np.frombuffer(base64.b64decode(fields["routed_experts"]), "<i4").reshape(-1, layers, k)
        fields["routed_experts"] = base64.b64encode(change(array).astype("<i4").tobytes()).decode()

    return apply


def next_one(rows: np.ndarray) -> np.ndarray:
    """Each row is that of the next token; the last one stays."""
    return np.concatenate([rows[1:], rows[-1:]])
