"""Corruptions that a proxy applies to the generations of a real server."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.engines.proxy import Exchange, Lie

_TOPK = "output_top_logprobs"
Change = Callable[[Any, Any], None]
"""Function ``(request, answer)`` that changes the answer in place."""


def generation_lie(change: Change, *, after: int = 0, but: str | None = None) -> Lie:
    """Return a corruption of every generation of more than two tokens: shorter ones have nothing to shift.

    Args:
        change: Change of a response of SGLang's ``/generate``.
        after: Number of correct responses before the first corrupt one.
        but: Part of the ids of requests that get correct responses, such as probes.
    """
    count = 0

    def lie(exchange: Exchange) -> None:
        nonlocal count
        if exchange.path != "/generate" or (but is not None and but in exchange.request["rid"]):
            return
        if isinstance(exchange.answer, dict):
            count += 1
            if count > after and len(exchange.answer.get("output_ids", ())) > 2:
                change(exchange.request, exchange.answer)

    return lie


def _topk(meta: Any, part: str, change: Callable[[Any], Any]) -> None:
    """Change the Top-K's values or ids, [R, K], in either encoding."""
    if f"{_TOPK}_shape" not in meta:
        column = ("val", "idx").index(part)
        result = change(np.array([[entry[column] for entry in row] for row in meta[_TOPK]]))
        meta[_TOPK] = meta[_TOPK][: len(result)]
        for row, values in zip(meta[_TOPK], result.tolist(), strict=True):
            for entry, value in zip(row, values, strict=True):
                entry[column] = value
        return
    name, dtype = f"{_TOPK}_{part}_flat_b64", {"val": "<f4", "idx": "<i4"}[part]
    values = np.frombuffer(base64.b64decode(meta[name]), dtype).reshape(meta[f"{_TOPK}_shape"])
    meta[name] = base64.b64encode(np.ascontiguousarray(change(values.copy()), dtype).tobytes()).decode()


def scaled_topk(request: Any, answer: Any) -> None:
    _topk(answer["meta_info"], "val", lambda values: values * values.dtype.type(0.7))


def shifted_topk(request: Any, answer: Any) -> None:
    for part in ("val", "idx"):
        _topk(answer["meta_info"], part, lambda values: np.roll(values, 1, axis=0))


def shifted_logprobs(request: Any, answer: Any) -> None:
    rows = answer["meta_info"]["output_token_logprobs"]
    values = [row[0] for row in rows]
    for row, value in zip(rows, [values[-1], *values[:-1]], strict=True):
        row[0] = value


def nan_logprobs(request: Any, answer: Any) -> None:
    for row in answer["meta_info"]["output_token_logprobs"]:
        row[0] = math.nan


def positive_logprobs(request: Any, answer: Any) -> None:
    for row in answer["meta_info"]["output_token_logprobs"]:
        row[0] = -row[0]


def truncated(request: Any, answer: Any) -> None:
    """Truncate ids, log-probabilities, Top-K and routes, and adjust every count."""
    meta, keep = answer["meta_info"], len(answer["output_ids"]) - 2
    del answer["output_ids"][keep:], meta["output_token_logprobs"][keep:]
    meta["completion_tokens"] = meta["output_token_logprobs_length"] = keep
    meta["weight_versions"] = [{**span, "end": min(span["end"], keep)} for span in meta["weight_versions"]]
    for part in ("val", "idx"):
        _topk(meta, part, lambda values: values[:keep])
    if f"{_TOPK}_shape" in meta:
        meta[f"{_TOPK}_shape"][0] = keep
    if meta.get("routed_experts"):
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        per_row = len(rows) // (meta["prompt_tokens"] + keep + 1)
        meta["routed_experts"] = base64.b64encode(rows[: -2 * per_row].tobytes()).decode()


class Swapped:
    """Corruption that returns the response of the previous request."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, request: Any, answer: Any) -> None:
        previous, self.last = self.last, copy.deepcopy(answer)
        if previous is not None:
            answer.clear()
            answer.update(previous)


def id_of_a_million(request: Any, answer: Any) -> None:
    answer["output_ids"][1] = 10**6
    answer["meta_info"]["output_token_logprobs"][1][1] = 10**6


def negative_id(request: Any, answer: Any) -> None:
    answer["output_ids"][1] = -1
    answer["meta_info"]["output_token_logprobs"][1][1] = -1


def null_id(request: Any, answer: Any) -> None:
    answer["output_ids"][1] = None


def text_logprob(request: Any, answer: Any) -> None:
    answer["meta_info"]["output_token_logprobs"][1][0] = "-1.5"


LIES: dict[str, tuple[Callable[[], Change], str]] = {
    "Top-K values x 0.7": (lambda: scaled_topk, "Top-K|most probable token"),
    "Top-K shifted": (lambda: shifted_topk, "Top-K|most probable token"),
    "log-probs shifted": (lambda: shifted_logprobs, "Top-K|most probable token"),
    "NaN log-probs": (lambda: nan_logprobs, "log-probability 0 is nan"),
    "positive log-probs": (lambda: positive_logprobs, r"log-probability \d+ is"),
    "answers swapped": (Swapped, "request id is"),
    "truncated": (lambda: truncated, "finish reason|last token"),
    "an id of a million": (lambda: id_of_a_million, "token 1 is 1000000"),
    "an id of -1": (lambda: negative_id, r"output_ids\[1\] is -1"),
    "a null": (lambda: null_id, r"output_ids\[1\] is None"),
    "a string": (lambda: text_logprob, r"output_token_logprobs\[1\] is '-1.5'"),
}
"""Name -> (factory of a corruption, pattern of the violation message)."""
