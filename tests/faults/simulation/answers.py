"""The columns of a response, and SGLang's JSON of them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.faults.simulation import model

Reply = Callable[[int, Any], None]
"""(HTTP status, JSON)"""


@dataclass
class Columns:
    """One answer of ``/generate`` before it becomes JSON; lies change it in place."""

    rid: str
    prompt: list[int]
    tokens: list[Any]
    logprobs: list[Any]
    topk_ids: np.ndarray | None
    topk_logprobs: np.ndarray | None
    routes: np.ndarray | None
    """[P + R - 1 - start, L, k]"""
    spans: list[tuple[str, int, int]]
    reason: str
    label: str
    matched: Any = None
    """the token that ended it, as the server says it"""


@dataclass(eq=False)
class Running:
    """One request that a server has."""

    rid: str
    body: Mapping[str, Any]
    reply: Reply
    done: list[int] = field(default_factory=list)
    """tokens that are sampled for good"""
    ahead: list[int] = field(default_factory=list)
    """what follows them if nothing interrupts"""
    spans: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(version, digest, start, end) of ``done``"""
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def prompt(self) -> list[int]:
        return self.body["input_ids"]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.body["sampling_params"]


def columns_of(request: Running, reason: str, label: str) -> Columns:
    """The right answer to a request that has ended."""
    tokens = [*request.prompt, *request.done]
    first, k = len(request.prompt) - 1, request.body["top_logprobs_num"]
    rows: list[int] = []
    for _, digest, start, end in request.spans:
        rows += model.rows_of(tokens[: first + 1 + end], digest)[first + start : first + end]
    routes = None
    if request.body.get("return_routed_experts") and request.done:
        begin = request.body["routed_experts_start_len"]
        # Those of a kept request come from the computation after the last interruption.
        routes = model.ROUTES[model.rows_of(tokens[:-1], request.spans[-1][1])[begin:]]
    return Columns(
        rid=request.rid,
        prompt=list(request.prompt),
        tokens=list(request.done),
        logprobs=model.logprobs_of(rows, request.done),
        topk_ids=model.RANKED[rows, :k] if k else None,
        topk_logprobs=model.RANKED_LOGPROBS[rows, :k] if k else None,
        routes=routes,
        spans=[(version, start, end) for version, _, start, end in request.spans],
        reason=reason,
        label=label,
        matched=request.done[-1] if reason == "stop" else None,
    )


def encode(columns: Columns, body: Mapping[str, Any], *, flat: bool) -> dict[str, Any]:
    """Return the body that SGLang sends.

    Args:
        columns: the response.
        body: of the request.
        flat: the Top-K as base64.
    """
    reason: dict[str, Any] = {"type": columns.reason}
    if columns.reason == "length":
        reason["length"] = len(columns.tokens)
    elif columns.reason == "stop":
        reason["matched"] = columns.matched
    meta: dict[str, Any] = {
        "id": columns.rid,
        "finish_reason": reason,
        "prompt_tokens": len(columns.prompt),
        "weight_version": columns.label,
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(columns.logprobs, columns.tokens, strict=False)],
        "completion_tokens": len(columns.tokens),
        "cached_tokens": 0,
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in columns.spans],
    }
    if columns.topk_ids is not None and columns.topk_logprobs is not None:
        meta |= _topk(columns.topk_ids, columns.topk_logprobs, flat)
    if columns.routes is not None:
        meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(columns.routes, "<i4").tobytes()).decode()
    answer = {"text": "", "output_ids": columns.tokens, "meta_info": meta}
    return answer | {"prompt_token_ids": columns.prompt} if body.get("return_prompt_token_ids") else answer


def _topk(ids: np.ndarray, values: np.ndarray, flat: bool) -> dict[str, Any]:
    name = "output_top_logprobs"
    if not flat:
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        return {name: [[[p, t, None] for t, p in zip(*row, strict=True)] for row in rows]}
    return {
        f"{name}_val_flat_b64": base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode(),
        f"{name}_idx_flat_b64": base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode(),
        f"{name}_val_flat_b64_dtype": "float32",
        f"{name}_idx_flat_b64_dtype": "int32",
        f"{name}_shape": list(ids.shape),
        f"{name}_null_prefix": 0,
    }
