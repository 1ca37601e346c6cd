"""Requests and responses of vLLM's ``/inference/v1/generate`` (0.32)."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo_engines.responses import FinishReason, SamplingMask, SamplingParams
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation
from megatron_dppo_engines.servers.fields import shorten
from megatron_dppo_engines.servers.wire import (
    Candidates,
    ColumnField,
    GenerationReader,
    apply_sampling_mask,
    common_sampling_params,
    restore_infinity,
)

_LOWEST = -9998.0
"""Threshold above -9999, which vLLM writes for every lower log-probability and for NaN."""
_MISSING = "a gateway in between may drop it: give the URLs of the servers themselves"
_CONTENT = "choices[0].logprobs.content"
_NUMPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>\d{1,9}(, \d{1,9})*),?\), \} *\n",
    re.DOTALL,
)
_SHOWN_HEADER_BYTES = 80
_PREFIX = "generate-tokens-"


def wire_id(request_id: str) -> str:
    """Return the name under which the server has a request that was sent as ``request_id``."""
    return f"{_PREFIX}{request_id}"


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the ``sampling_params`` of a request.

    ``seed`` is not sent. With a seed, a request cannot be computed again on a CPU: vLLM 0.32 crashes after a pause
    ("CPU Generator does not use offset"). It would not make a rollout repeatable either, since the server decides which
    requests share a batch.

    With filters, vLLM's log-probabilities are those over the allowed tokens.
    """
    k = params.topk_logprobs
    return common_sampling_params(params, stop_token_ids) | {
        "max_tokens": params.max_new_tokens,
        "min_tokens": 0,
        "top_k": params.top_k,
        # One more than wanted, since vLLM counts the sampled token as one of them. The most probable token is a
        # witness: log-probabilities that were shifted or scaled do not fit it.
        "logprobs": max(k, 1) + 1,
        # The trainer decodes the tokens itself.
        "detokenize": False,
    }


def generate_body(request: GenerateRequest, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of ``/inference/v1/generate`` for the base weights, or for a LoRA adapter of the server."""
    sampling = sampling_params(request.params, request.stop_token_ids)
    if request.routing is not None:
        sampling["routed_experts_prompt_start"] = request.routing_start
    return {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": sampling | _Reader.column_request(request.params),
        "return_token_ids": True,
        **({} if adapter is None else {"model": adapter}),
    }


def decode_generation(response: object, request: GenerateRequest, url: str) -> Generation:
    """Read the response to ``generate_body``."""
    reader = _Reader(response, request, url)
    reason = reader.finish_reason()
    tokens = reader.tokens()
    if not len(tokens) or (reason == FinishReason.ABORT and not reader.has_requested_fields()):
        # vLLM sends no routed experts for an aborted request.
        return Generation.empty(reason, reader.echo_request_id())
    entries = reader.entries(tokens)
    logprobs = reader.read_float32([entry.get("logprob") for entry in entries], f"{_CONTENT}.logprob")
    logprobs = restore_infinity(logprobs, _LOWEST)
    candidates = reader.candidates(entries)
    sampling_mask = None
    if request.params.return_sampling_mask:
        sampling_mask = reader.sampling_mask(len(tokens))
        candidates = apply_sampling_mask(sampling_mask, candidates)
    return reader.generation(tokens, logprobs, candidates, sampling_mask)


class _Reader(GenerationReader):
    """Reader for one response of ``/inference/v1/generate``."""

    column_fields: ClassVar[Mapping[str, ColumnField]] = {}
    path = "choices[0]"
    version_cause = f"vLLM 0.32 has it; update the server. If it is newer, {_MISSING}"
    mask_fields = ("sampling_mask",)

    def __init__(self, response: object, request: GenerateRequest, url: str) -> None:
        super().__init__(request, url, _MISSING)
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            self.reject_body(response, "an object with one of choices")
        assert isinstance(response, dict)
        self.response = response
        self.parent = choices[0]

    def finish_reason(self) -> FinishReason:
        return self.read_finish_reason(self.field("finish_reason"), "choices[0].finish_reason")

    def tokens(self) -> NDArray[np.int32]:
        return self.read_ids(self.field("token_ids"), "choices[0].token_ids")

    def echo_request_id(self) -> Echo:
        name = self.read_string(self.require(self.response, "request_id", "request_id"), "request_id")
        return Echo(request_id=name.removeprefix(_PREFIX))

    def _counts(self) -> tuple[Mapping[str, Any], str]:
        return self.read_object(self.require(self.response, "usage", "usage"), "usage"), "usage"

    def _stop_reason(self) -> object:
        return self.parent.get("stop_reason")

    def entries(self, tokens: NDArray[np.int32]) -> list[dict[str, Any]]:
        """Return R entries ``{token_id, logprob, top_logprobs}``."""
        logprobs = self.read_object(self.field("logprobs"), "choices[0].logprobs")
        entries = self.read_array(self.require(logprobs, "content", _CONTENT), _CONTENT)
        if not set(map(type, entries)) <= {dict}:
            self.reject(_CONTENT, "has an entry that is no object")
        if [entry.get("token_id") for entry in entries] != tokens.tolist():
            self.reject(_CONTENT, "belongs to other tokens than choices[0].token_ids")
        return entries

    def candidates(self, entries: Sequence[dict[str, Any]]) -> Candidates:
        """Return the most probable tokens and their log-probabilities, both [R, max(K, 1)]."""
        k = max(self._request.params.topk_logprobs, 1)
        field = f"{_CONTENT}.top_logprobs"
        tops = [
            self.read_array(entry.get("top_logprobs") or [], f"{_CONTENT}[{step}].top_logprobs")
            for step, entry in enumerate(entries)
        ]
        rows = [*chain.from_iterable(tops)]
        if not set(map(type, rows)) <= {dict}:
            self.reject(field, "has an entry that is no object")
        # The sampled token comes with its own rank, which may be beyond K; rank 0 marks a row to leave out.
        ranks = [candidate.get("rank") for candidate in rows]
        ranks = [rank if type(rank) is int and 0 < rank <= k else 0 for rank in ranks]
        ranked = [*compress(rows, ranks)]
        steps = np.repeat(np.arange(len(tops)), [len(top) for top in tops])
        rank_array = np.array(ranks, dtype=np.int64)
        cells = steps[rank_array > 0] * k + rank_array[rank_array > 0] - 1
        self._require_all_ranks(cells, len(tops), k)
        ids = np.empty(len(tops) * k, dtype=np.int32)
        logprobs = np.empty(len(tops) * k, dtype=np.float32)
        # The sampled token and another one of equal probability have the same rank: the later one counts.
        ids[cells] = self.read_ids([candidate.get("token_id") for candidate in ranked], field)
        values = self.read_float32([candidate.get("logprob") for candidate in ranked], field)
        logprobs[cells] = restore_infinity(values, _LOWEST)
        return Candidates(ids.reshape(-1, k), logprobs.reshape(-1, k))

    def sampling_mask(self, length: int) -> SamplingMask:
        """Return the token ids that the sampling filters allowed for each of R tokens."""
        cause = f"start the server with --return-sampling-mask (needs a GPU). If it was started so, {_MISSING}"
        return self.read_sampling_mask(self.field("sampling_mask", cause), length, "choices[0].sampling_mask")

    def _require_all_ranks(self, cells: NDArray[np.int64], length: int, k: int) -> None:
        """Reject the response if a step lacks the token of a rank."""
        is_missing = np.bincount(cells, minlength=length * k) == 0
        if is_missing.any():
            step, rank = divmod(int(is_missing.argmax()), k)
            expected = f"the request asks for the {k} most probable ones. If something between here and the server"
            detail = f"has no token of rank {rank + 1}; {expected} drops them, {_MISSING}"
            self.reject(f"{_CONTENT}[{step}].top_logprobs", detail)

    def routed_experts(self, response_length: int) -> Tensor | None:
        shape = self._request.routing
        if shape is None:
            return None
        field = "choices[0].routed_experts"
        cause = f"start the server with --enable-return-routed-experts (needs a GPU). If it was started so, {_MISSING}"
        routes = self._read_numpy_file(self.field("routed_experts", cause), field)
        # int64, because 255 of a uint8 could be taken for a missing row.
        return self.compact(torch.from_numpy(routes.astype(np.int64)), shape, field, response_length)

    def _read_numpy_file(self, value: object, field: str) -> NDArray[Any]:
        """Decode base64 of a NumPy file of integers.

        ``np.load`` is not safe here: it trusts the sizes in the file and reads other formats too.
        """
        content = self.read_base64(value, field)
        header = _NUMPY_HEADER.match(content)
        if header is None:
            start = shorten(content[:_SHOWN_HEADER_BYTES])
            self.reject(field, f"is not a NumPy file of integers: it begins with {start}")
        shape = [int(size) for size in header["shape"].split(b",") if size.strip()]
        dtype = np.dtype(header["dtype"].decode())
        numbers = content[header.end() :]
        if math.prod(shape) * dtype.itemsize != len(numbers):
            self.reject(field, f"holds {len(numbers)} bytes for {shape} numbers of type {dtype}")
        return np.frombuffer(numbers, dtype=dtype).reshape(shape)
