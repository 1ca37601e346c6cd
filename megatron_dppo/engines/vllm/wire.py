"""The body of vLLM's ``/inference/v1/generate`` and what comes back (0.32)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.data.routing import compact_routes
from megatron_dppo.engines.servers.fields import Fields, keep_allowed, never_below, shown, with_sampled
from megatron_dppo.rollout.server import Echo, GenerateRequest, Generation
from megatron_dppo.types import FinishReason, SamplingMask, SamplingParams, VersionSpan

_NEVER = -9998.0
"""vLLM writes -9999 for everything below, and for what is not a number."""

_LOST = "a gateway in between may drop it: give the URLs of the servers themselves"


_CONTENT = "choices[0].logprobs.content"
_NUMPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>\d{1,9}(, \d{1,9})*),?\), \} *\n",
    re.DOTALL,
)
_HEADER = 80
_PREFIX = "generate-tokens-"


def wire_id(own: str) -> str:
    """The name under which the server knows a request that was sent as ``own``."""
    return f"{_PREFIX}{own}"


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every field that shapes the distribution, also at its default: a server can be started with other defaults.

    ``seed`` is not one of them. With a seed of its own a request cannot be computed again on a CPU: vLLM 0.32 dies of
    it after a pause ("CPU Generator does not use offset"). And it would not make a rollout repeatable: which requests
    share a batch is up to the server.

    With filters vLLM's log-probabilities are those over the tokens that are left.
    """
    k = params.topk_logprobs
    return {
        "max_tokens": params.max_new_tokens,
        "min_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
        # One more than wanted: of those that it was asked for, the server counts the sampled token as one. The most
        # probable token is a witness: log-probabilities that were shifted or scaled do not fit to it.
        "logprobs": max(k, 1) + 1,
        # Text is made from the tokens by the trainer.
        "detokenize": False,
    }


def generate_body(request: GenerateRequest, adapter: str | None = None) -> dict[str, Any]:
    """The body of ``/inference/v1/generate``; ``adapter``: the server's name of what is added to its weights."""
    sampling = sampling_params(request.params, request.stop_token_ids)
    if request.routing is not None:
        sampling["routed_experts_prompt_start"] = request.routing_start
    return {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": sampling,
        "return_token_ids": True,
        **({} if adapter is None else {"model": adapter}),
    }


def decode_generation(answer: Any, request: GenerateRequest, url: str) -> Generation:
    """Read the answer to ``generate_body``.

    Raises:
        ContractViolation: a field that was asked for is missing, or is something else; the field is named.
        ServerError: the whole answer is something else.
    """
    reader = _Reader(answer, request, url)
    reason, tokens = reader.finish_reason(), reader.tokens()
    if not len(tokens) or (reason == FinishReason.ABORT and not reader.complete()):
        return Generation.empty(reason, reader.name())
    entries = reader.entries(tokens)
    logprobs = reader.floats([entry.get("logprob") for entry in entries], f"{_CONTENT}.logprob")
    logprobs = never_below(logprobs, _NEVER)
    ids, values = reader.candidates(entries)
    sampling_mask = reader.sampling_mask(len(tokens)) if request.params.return_sampling_mask else None
    if sampling_mask is not None:
        ids, values = keep_allowed(sampling_mask, ids, values)
    topk = with_sampled(ids, values, tokens, logprobs) if request.params.topk_logprobs else (None, None)
    return Generation(
        token_ids=torch.from_numpy(tokens),
        logprobs=torch.from_numpy(logprobs),
        finish_reason=reason,
        versions=reader.versions(len(tokens)),
        topk_token_ids=topk[0],
        topk_logprobs=topk[1],
        sampling_mask=sampling_mask,
        routed_experts=reader.routed_experts(len(tokens)),
        echo=reader.echo(ids[:, 0], values[:, 0]),
    )


class _Reader(Fields):
    """One answer; each method reads one part of it."""

    def __init__(self, answer: Any, request: GenerateRequest, url: str) -> None:
        super().__init__(url, request.request_id, _LOST)
        self._request = request
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            self.junk(answer, "an object with one of choices")
        self._answer: dict[str, Any] = answer
        self._choice: dict[str, Any] = choices[0]

    def _field(self, name: str, cause: str | None = None) -> Any:
        return self.present(self._choice, name, f"choices[0].{name}", cause)

    def finish_reason(self) -> FinishReason:
        """``stop``, ``length`` or ``abort``."""
        reason = self._field("finish_reason")
        return self.finish(reason, "choices[0].finish_reason")

    def tokens(self) -> NDArray[np.int32]:
        """[R]"""
        return self.ids(self._field("token_ids"), "choices[0].token_ids")

    def complete(self) -> bool:
        """Whether all that was asked for is there: of an aborted request vLLM sends no routed experts."""
        wanted = ["routed_experts"] if self._request.routing is not None else []
        wanted += ["sampling_mask"] if self._request.params.return_sampling_mask else []
        return all(self._choice.get(name) is not None for name in wanted)

    def name(self) -> Echo:
        """What every answer says."""
        name = self.text(self.present(self._answer, "request_id", "request_id"), "request_id")
        return Echo(request_id=name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name)

    def echo(self, best_ids: NDArray[np.int32], best_logprobs: NDArray[np.float32]) -> Echo:
        """What a complete answer says of itself; both arrays [R]."""
        usage = self.mapping(self.present(self._answer, "usage", "usage"), "usage")
        keys = ("prompt_tokens", "completion_tokens")
        counts = [self.integer(self.present(usage, key, f"usage.{key}"), f"usage.{key}") for key in keys]
        prompt = self.present(self._answer, "prompt_token_ids", "prompt_token_ids")
        ended = self._choice.get("stop_reason")
        return Echo(
            request_id=self.name().request_id,
            prompt_token_ids=tuple(self.integers(prompt, "prompt_token_ids")),
            prompt_length=counts[0],
            response_length=counts[1],
            matched_stop=ended if type(ended) is int else None if ended is None else str(ended)[:80],
            best_token_ids=best_ids,
            best_logprobs=best_logprobs,
        )

    def entries(self, tokens: NDArray[np.int32]) -> list[dict[str, Any]]:
        """[R] of ``{token_id, logprob, top_logprobs}``."""
        logprobs = self.mapping(self._field("logprobs"), "choices[0].logprobs")
        entries = self.rows(self.present(logprobs, "content", _CONTENT), _CONTENT)
        if not set(map(type, entries)) <= {dict}:
            self.refuse(_CONTENT, "has an entry that is no object")
        if [entry.get("token_id") for entry in entries] != tokens.tolist():
            self.refuse(_CONTENT, "belongs to other tokens than choices[0].token_ids")
        return entries

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans that cover the response."""
        cause = f"vLLM 0.32 has it; update the server. If it is newer, {_LOST}"
        return self.spans(self._field("weight_versions", cause), length, "choices[0].weight_versions")

    def candidates(self, entries: Sequence[dict[str, Any]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The most probable tokens and their log-probabilities, both [R, max(K, 1)]."""
        k, name = max(self._request.params.topk_logprobs, 1), f"{_CONTENT}.top_logprobs"
        tops = [
            self.rows(entry.get("top_logprobs") or [], f"{_CONTENT}[{step}].top_logprobs")
            for step, entry in enumerate(entries)
        ]
        found = [*chain.from_iterable(tops)]
        if not set(map(type, found)) <= {dict}:
            self.refuse(name, "has an entry that is no object")
        # The sampled token comes with its own rank, which may be beyond K.
        ranks = [candidate.get("rank") for candidate in found]
        ranks = [rank if type(rank) is int and 0 < rank <= k else 0 for rank in ranks]
        wanted = [*compress(found, ranks)]
        steps = np.repeat(np.arange(len(tops)), [len(top) for top in tops])
        chosen = np.array(ranks, dtype=np.int64)
        cells = steps[chosen > 0] * k + chosen[chosen > 0] - 1
        self._check_complete(cells, len(tops), k)
        ids = np.empty(len(tops) * k, dtype=np.int32)
        logprobs = np.empty(len(tops) * k, dtype=np.float32)
        # Of two with one rank, as the sampled token and another of the same probability have, the later one counts.
        ids[cells] = self.ids([candidate.get("token_id") for candidate in wanted], name)
        values = self.floats([candidate.get("logprob") for candidate in wanted], name)
        logprobs[cells] = never_below(values, _NEVER)
        return ids.reshape(-1, k), logprobs.reshape(-1, k)

    def sampling_mask(self, length: int) -> SamplingMask:
        """Of R tokens, the ids that the filters left."""
        cause = f"start the server with --return-sampling-mask (needs a GPU). If it was started so, {_LOST}"
        return self.sets(self._field("sampling_mask", cause), length, "choices[0].sampling_mask")

    def _check_complete(self, cells: NDArray[np.int64], length: int, k: int) -> None:
        """Whether each step has a token of each rank."""
        missing = np.bincount(cells, minlength=length * k) == 0
        if missing.any():
            step, rank = divmod(int(missing.argmax()), k)
            asked = f"the {k} most probable ones were asked for. If something between here and the server drops"
            self.refuse(f"{_CONTENT}[{step}].top_logprobs", f"has no token of rank {rank + 1}; {asked} them, {_LOST}")

    def routed_experts(self, response: int) -> Tensor | None:
        """[P + R - 1 - start, L, k] in the dtype of routes, dense layers marked missing."""
        shape = self._request.routing
        if shape is None:
            return None
        name = "choices[0].routed_experts"
        cause = f"start the server with --enable-return-routed-experts (needs a GPU). If it was started so, {_LOST}"
        routes = self._array(self._field("routed_experts", cause), name)
        rows = len(self._request.token_ids) + response - 1 - self._request.routing_start
        try:
            # 255 of a uint8 could be taken for a missing row.
            return compact_routes(torch.from_numpy(routes.astype(np.int64)), shape, tokens=rows, request=name)
        except ValueError as error:
            self.refuse(name, str(error).removeprefix(f"{name}: "))

    def _array(self, value: Any, name: str) -> NDArray[Any]:
        """Base64 of a NumPy file, as ``np.save`` writes integers; ``np.load`` would believe any size and read more."""
        content = self.decoded(value, name)
        header = _NUMPY.match(content)
        if header is None:
            self.refuse(name, f"is not a NumPy file of integers: it begins with {shown(content[:_HEADER])}")
        shape = [int(size) for size in header["shape"].split(b",") if size.strip()]
        dtype, numbers = np.dtype(header["dtype"].decode()), content[header.end() :]
        if math.prod(shape) * dtype.itemsize != len(numbers):
            self.refuse(name, f"holds {len(numbers)} bytes for {shape} numbers of type {dtype}")
        return np.frombuffer(numbers, dtype=dtype).reshape(shape)
