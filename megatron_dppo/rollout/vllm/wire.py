"""The body of vLLM's ``/inference/v1/generate`` and what comes back (0.32)."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.routing import compact_routes
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.replies import refuse_filters, version_spans, with_sampled
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.types import SamplingParams, VersionSpan

_NEVER = -9998.0
"""vLLM writes -9999 for everything below, and for what is not a number."""

_LOST = "a gateway in between may drop it: give the URLs of the servers themselves"


def wire_id(own: str) -> str:
    """The name under which the server knows a request that was sent as ``own``."""
    return f"generate-tokens-{own}"


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every field that shapes the distribution, also at its default: a server can be started with other defaults.

    ``seed`` is not one of them. With a seed of its own a request cannot be computed again on a CPU: vLLM 0.32 dies of
    it after a pause ("CPU Generator does not use offset"). And it would not make a rollout repeatable: which requests
    share a batch is up to the server.

    Raises:
        ConfigError: top-p or top-k: vLLM's log-probabilities are those of the tokens that are left.
    """
    refuse_filters(
        params,
        "vLLM renormalises its log-probabilities over the tokens that these filters keep, so they would not be those "
        "of the policy that is trained",
    )
    k = params.topk_logprobs
    return {
        "max_tokens": params.max_new_tokens,
        "min_tokens": 0,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
        # One more than wanted: of those that it was asked for, the server counts the sampled token as one.
        "logprobs": k + 1 if k else 0,
        # Text is made from the tokens by the trainer.
        "detokenize": False,
    }


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """The body of ``/inference/v1/generate``."""
    sampling = sampling_params(request.params, request.stop_token_ids)
    if request.routing is not None:
        sampling["routed_experts_prompt_start"] = request.routing_start
    return {"request_id": request.request_id, "token_ids": list(request.token_ids), "sampling_params": sampling}


def decode_generation(answer: Any, request: GenerateRequest, url: str) -> Generation:
    """Read the answer to ``generate_body``.

    Raises:
        ServerError: a field that was asked for is missing, or its content does not fit the request; the field is named.
    """
    reader = _Reader(answer, request, url)
    reason, tokens = reader.finish_reason(), reader.tokens()
    if not tokens or (reason == "abort" and not reader.complete()):
        return Generation(token_ids=(), logprobs=(), finish_reason=reason, versions=())
    entries = reader.entries(tokens)
    logprobs = tuple(_logprob(entry["logprob"]) for entry in entries)
    topk = reader.topk(entries, tokens, logprobs)
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=reason,
        versions=reader.versions(len(tokens)),
        topk_token_ids=None if topk is None else topk[0],
        topk_logprobs=None if topk is None else topk[1],
        routed_experts=reader.routed_experts(len(tokens)),
    )


def _logprob(value: float) -> float:
    return float("-inf") if value <= _NEVER else float(value)


class _Reader:
    """One answer; each method reads one part of it."""

    def __init__(self, answer: Any, request: GenerateRequest, url: str) -> None:
        self._request, self._url = request, url
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            self._refuse(f"expected an object with one of choices, got {str(answer)[:200]!r}")
        self._choice: dict[str, Any] = choices[0]

    def _refuse(self, reason: str) -> NoReturn:
        raise ServerError(self._url, reason)

    def _field(self, name: str, cause: str = _LOST) -> Any:
        if self._choice.get(name) is None:
            self._refuse(f"the answer has no choices[0].{name}: {cause}")
        return self._choice[name]

    def finish_reason(self) -> Any:
        """``stop``, ``length`` or ``abort``."""
        reason = self._field("finish_reason")
        if reason not in ("stop", "length", "abort"):
            self._refuse(f"choices[0].finish_reason is {reason!r}; expected stop, length or abort")
        return reason

    def tokens(self) -> tuple[int, ...]:
        """[R]"""
        return tuple(int(token) for token in self._field("token_ids"))

    def complete(self) -> bool:
        """Whether all that was asked for is there: of an aborted request vLLM sends no routed experts."""
        return self._request.routing is None or self._choice.get("routed_experts") is not None

    def entries(self, tokens: tuple[int, ...]) -> list[Mapping[str, Any]]:
        """[R] of ``{token_id, logprob, top_logprobs}``."""
        logprobs = self._field("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if entries is None or tuple(entry["token_id"] for entry in entries) != tokens:
            self._refuse("choices[0].logprobs.content belongs to other tokens than choices[0].token_ids")
        return list(entries)

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans that cover the response."""
        spans = self._field("weight_versions", f"vLLM 0.32 has it; update the server. If it is newer, {_LOST}")
        try:
            return version_spans(spans, length)
        except ValueError as error:
            self._refuse(f"choices[0].weight_versions {error}")

    def topk(
        self, entries: Sequence[Mapping[str, Any]], tokens: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Ids int32 and log-probabilities float32, both [R, K+1] (see ``Completion``)."""
        k = self._request.params.topk_logprobs
        if not k:
            return None
        ids = np.empty((len(entries), k), dtype=np.int32)
        values = np.empty((len(entries), k), dtype=np.float32)
        filled = np.zeros((len(entries), k), dtype=bool)
        for i, entry in enumerate(entries):
            for candidate in entry.get("top_logprobs") or ():
                rank = (candidate.get("rank") or k + 1) - 1
                if rank < k:
                    ids[i, rank], values[i, rank] = candidate["token_id"], _logprob(candidate["logprob"])
                    filled[i, rank] = True
        if not filled.all():
            step, rank = np.argwhere(~filled)[0]
            self._refuse(
                f"choices[0].logprobs.content[{step}].top_logprobs has no token of rank {rank + 1}; the {k} most "
                f"probable ones were asked for. If something between here and the server drops them, {_LOST}"
            )
        return with_sampled(ids, values, tokens, logprobs)

    def routed_experts(self, response: int) -> Tensor | None:
        """[P + R - 1 - start, L, k] in the dtype of routes, dense layers marked missing."""
        shape = self._request.routing
        if shape is None:
            return None
        text = self._field(
            "routed_experts",
            f"start the server with --enable-return-routed-experts (needs a GPU). If it was started so, {_LOST}",
        )
        try:
            file = io.BytesIO(base64.b64decode(text, validate=True))
            # Not np.load, which also opens archives.
            routes = np.lib.format.read_array(file, allow_pickle=False)
        except (binascii.Error, ValueError, TypeError, EOFError) as error:
            self._refuse(f"choices[0].routed_experts is not base64 of a NumPy file: {error}")
        if routes.dtype.kind not in "iu":
            self._refuse(f"choices[0].routed_experts has type {routes.dtype}, expected integers")
        rows = len(self._request.token_ids) + response - 1 - self._request.routing_start
        try:
            # 255 of a uint8 could be taken for a missing row.
            values = torch.from_numpy(routes.astype(np.int64))
            return compact_routes(values, shape, tokens=rows, request="choices[0].routed_experts")
        except ValueError as error:
            self._refuse(str(error))
