"""The body of SGLang's ``/generate`` and what comes back, for 0.5.19 and later."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.data.routing import compact_routes
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.replies import refuse_filters, version_spans, with_sampled
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.types import SamplingParams, VersionSpan

_NEVER = float(np.finfo(np.float32).min) / 2
"""SGLang writes -inf as the lowest float32, since JSON has no infinity."""

_LOST = (
    "the request asked for it, so something between here and the server drops fields (sglang-router re-serialises "
    "requests and answers): give the URLs of the servers themselves"
)


def wire_id(own: str) -> str:
    """The ``rid`` of a request. SGLang aborts every request whose id starts with the given one; no two of these do."""
    return f"{len(own)}:{own}"


def version_parts(version: Any) -> tuple[int, ...]:
    """SGLang's own version: ``0.5.15.post1`` as (0, 5, 15)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(int(part) for part in match.groups()) if match else (0,)


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every field that shapes the distribution, also at its default: a server can be started with other defaults.

    Raises:
        ConfigError: top-p or top-k: SGLang's log-probabilities are those before the filter.
    """
    refuse_filters(
        params,
        "SGLang reports log-probabilities before these filters, so they would not be those of the policy that sampled",
    )
    return {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
        # Only heard by a server with --enable-deterministic-inference.
        "sampling_seed": params.seed,
    }


def generate_body(request: GenerateRequest, *, flat: bool) -> dict[str, Any]:
    """The body of ``/generate``.

    Args:
        request: what to continue.
        flat: whether the server knows the flat Top-K encoding of responses (0.5.22).
    """
    body: dict[str, Any] = {
        "rid": wire_id(request.request_id),
        "input_ids": list(request.token_ids),
        "sampling_params": sampling_params(request.params, request.stop_token_ids),
        "return_logprob": True,
        # Log-probabilities of the prompt are not wanted: SGLang gives those at temperature 1.
        "logprob_start_len": -1,
        "top_logprobs_num": request.params.topk_logprobs,
    }
    if request.params.topk_logprobs and flat:
        body |= {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    if request.routing is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routing_start}
    return body


def decode_generation(answer: Any, request: GenerateRequest, url: str) -> Generation:
    """Read the answer to ``generate_body``.

    Raises:
        ServerError: a field that was asked for is missing, or its content does not fit the request; the field is named.
    """
    reader = _Reader(answer, request, url)
    reason = reader.finish_reason()
    if reason == "abort" and not reader.complete():
        return Generation(token_ids=(), logprobs=(), finish_reason="abort", versions=())
    tokens = tuple(int(token) for token in reader.answer_field("output_ids"))
    if not tokens:
        return Generation(token_ids=(), logprobs=(), finish_reason=reason, versions=())
    logprobs = reader.logprobs(tokens)
    topk = reader.topk(tokens, logprobs)
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=reason,
        versions=reader.versions(len(tokens)),
        topk_token_ids=None if topk is None else topk[0],
        topk_logprobs=None if topk is None else topk[1],
        routed_experts=reader.routed_experts(len(tokens)),
    )


class _Reader:
    """One answer; each method reads one part of it."""

    def __init__(self, answer: Any, request: GenerateRequest, url: str) -> None:
        self._request, self._url = request, url
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            self._refuse(f"expected an object with output_ids and meta_info, got {str(answer)[:200]!r}")
        self._answer: dict[str, Any] = answer
        self._meta: dict[str, Any] = answer["meta_info"]

    def _refuse(self, reason: str) -> NoReturn:
        raise ServerError(self._url, reason)

    def answer_field(self, name: str) -> Any:
        """A field beside ``meta_info``."""
        if self._answer.get(name) is None:
            self._refuse(f"the answer has no {name}; {_LOST}")
        return self._answer[name]

    def _field(self, name: str, cause: str) -> Any:
        if self._meta.get(name) is None:
            self._refuse(f"the answer has no meta_info.{name}: {cause}")
        return self._meta[name]

    def complete(self) -> bool:
        """Whether all that was asked for is there. SGLang sends less of a request that it aborts in its queue."""
        wanted = ["output_token_logprobs", "weight_versions"]
        wanted += ["routed_experts"] if self._request.routing is not None else []
        return all(self._meta.get(name) is not None for name in wanted)

    def finish_reason(self) -> Any:
        """``stop``, ``length`` or ``abort``."""
        reason = self._field("finish_reason", _LOST)
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind not in ("stop", "length", "abort"):
            self._refuse(f"meta_info.finish_reason is {reason!r}; expected stop, length or abort")
        return kind

    def logprobs(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """[R], of the sampled tokens."""
        rows = self._field("output_token_logprobs", _LOST)
        if tuple(row[1] for row in rows) != tokens:
            self._refuse("meta_info.output_token_logprobs belongs to other tokens than output_ids")
        return tuple(float("-inf") if row[0] <= _NEVER else float(row[0]) for row in rows)

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans that cover the response."""
        spans = self._field(
            "weight_versions", f"SGLang has it since 0.5.19; update the server. If it is newer, {_LOST}"
        )
        try:
            return version_spans(spans, length)
        except ValueError as error:
            self._refuse(f"meta_info.weight_versions {error}")

    def topk(self, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> tuple[Tensor, Tensor] | None:
        """Ids int32 and log-probabilities float32, both [R, K+1] (see ``Completion``)."""
        k = self._request.params.topk_logprobs
        if not k:
            return None
        if "output_top_logprobs_val_flat_b64" in self._meta:
            ids, values = self._flat_topk()
        else:
            rows = self._field("output_top_logprobs", _LOST)
            ids = np.array([[entry[1] for entry in row] for row in rows], dtype=np.int32)
            values = np.array([[entry[0] for entry in row] for row in rows], dtype=np.float32)
        if ids.shape != (len(tokens), k) or values.shape != ids.shape:
            self._refuse(f"meta_info.output_top_logprobs has shape {list(ids.shape)}, expected [{len(tokens)}, {k}]")
        values = np.where(values <= _NEVER, np.float32("-inf"), values)
        return with_sampled(ids, values, tokens, logprobs)

    def _flat_topk(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        name = "output_top_logprobs"
        shape = self._field(f"{name}_shape", _LOST)
        formats = [self._field(f"{name}_{part}_flat_b64_dtype", _LOST) for part in ("idx", "val")]
        if formats != ["int32", "float32"]:
            self._refuse(f"meta_info.{name}_*_flat_b64_dtype is {formats}, expected int32 and float32")
        ids = self._numbers(f"{name}_idx_flat_b64", "<i4")
        values = self._numbers(f"{name}_val_flat_b64", "<f4")
        if ids.size != int(np.prod(shape)) or values.size != ids.size:
            self._refuse(f"meta_info.{name}: {ids.size} ids and {values.size} values, expected {shape}")
        return ids.reshape(shape).astype(np.int32), values.reshape(shape).astype(np.float32)

    def _numbers(self, name: str, dtype: str) -> NDArray[Any]:
        try:
            return np.frombuffer(base64.b64decode(self._field(name, _LOST), validate=True), dtype=dtype)
        except (binascii.Error, ValueError, TypeError) as error:
            self._refuse(f"meta_info.{name} is not base64 of {dtype} numbers: {error}")

    def routed_experts(self, response: int) -> Tensor | None:
        """[P + R - 1 - start, L, k] in the dtype of routes, dense layers marked missing."""
        shape = self._request.routing
        if shape is None:
            return None
        self._field(
            "routed_experts", f"start the server with --enable-return-routed-experts. If it was started so, {_LOST}"
        )
        flat = self._numbers("routed_experts", "<i4")
        rows = len(self._request.token_ids) + response - 1 - self._request.routing_start
        if flat.size != rows * shape.num_layers * shape.topk:
            self._refuse(
                f"meta_info.routed_experts holds {flat.size} numbers, expected {rows} positions x {shape.num_layers} "
                f"layers x {shape.topk} experts a token: the server runs another model, or drops positions"
            )
        if flat.size and not 0 <= flat.min() <= flat.max() < shape.num_experts:
            self._refuse(
                f"meta_info.routed_experts names experts {flat.min()} to {flat.max()}; "
                f"the model has {shape.num_experts}, counted from 0"
            )
        routes = torch.from_numpy(flat.reshape(rows, shape.num_layers, shape.topk).copy())
        try:
            return compact_routes(routes, shape, tokens=rows, request="meta_info.routed_experts")
        except ValueError as error:
            self._refuse(str(error))
