"""The body of SGLang's ``/generate`` and what comes back, for 0.5.19 and later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.data.routing import compact_routes
from megatron_dppo.engines.servers.fields import Fields, keep_allowed, never_below, shown, with_sampled
from megatron_dppo.rollout.server import Echo, GenerateRequest, Generation
from megatron_dppo.types import FinishReason, SamplingMask, SamplingParams, VersionSpan

_NEVER = float(np.finfo(np.float32).min) / 2
"""SGLang writes -inf as the lowest float32, since JSON has no infinity."""

_SETS, _FILTERED = "output_token_sampling_mask", "output_token_sampling_logprobs"

_LOST = (
    "the request asked for it, so something between here and the server drops fields (sglang-router re-serialises "
    "requests and answers): give the URLs of the servers themselves"
)


def wire_id(own: str) -> str:
    """The ``rid`` of a request. SGLang aborts every request whose id starts with the given one; no two of these do."""
    return f"{len(own)}:{own}"


def own_id(wire: str) -> str:
    """The request that a ``rid`` belongs to; the ``rid`` itself where it is none of ours."""
    own = wire.partition(":")[2]
    return own if wire_id(own) == wire else wire


def version_parts(version: Any) -> tuple[int, ...]:
    """SGLang's own version: ``0.5.15.post1`` as (0, 5, 15)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(int(part) for part in match.groups()) if match else (0,)


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Every field that shapes the distribution, also at its default: a server can be started with other defaults.

    With filters and without sampling masks SGLang's log-probabilities are those before the filter: for answers that
    nobody trains on.
    """
    return {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
        # Only heard by a server with --enable-deterministic-inference.
        "sampling_seed": params.seed,
    }


def generate_body(request: GenerateRequest, *, flat: bool, adapter: str | None = None) -> dict[str, Any]:
    """The body of ``/generate``.

    Args:
        request: what to continue.
        flat: whether the server knows the flat Top-K encoding of responses (0.5.22).
        adapter: the server's name of what is added to its weights.
    """
    body: dict[str, Any] = {
        "rid": wire_id(request.request_id),
        "input_ids": list(request.token_ids),
        "sampling_params": sampling_params(request.params, request.stop_token_ids),
        "return_logprob": True,
        # Log-probabilities of the prompt are not wanted: SGLang gives those at temperature 1.
        "logprob_start_len": -1,
        # The most probable token is a witness: log-probabilities that were shifted or scaled do not fit to it.
        "top_logprobs_num": max(request.params.topk_logprobs, 1),
        "return_prompt_token_ids": True,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    if flat:
        body |= {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    if request.routing is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routing_start}
    if request.params.return_sampling_mask:
        # "selected": the sampled token's log-probability alone, of the softmax over the allowed ids.
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def decode_generation(answer: Any, request: GenerateRequest, url: str) -> Generation:
    """Read the answer to ``generate_body``.

    Raises:
        ContractViolation: a field that was asked for is missing, or is something else; the field is named.
        ServerError: the whole answer is something else.
    """
    reader = _Reader(answer, request, url)
    reason = reader.finish_reason()
    if reason == FinishReason.ABORT and not reader.complete():
        return Generation.empty(reason, reader.name())
    tokens = reader.tokens()
    if not len(tokens):
        return Generation.empty(reason, reader.name())
    logprobs = reader.logprobs(tokens)
    ids, values = reader.candidates(len(tokens))
    k, sampling_mask = request.params.topk_logprobs, None
    if request.params.return_sampling_mask:
        sampling_mask, filtered = reader.sampling_mask(len(tokens)), reader.filtered_logprobs(len(tokens))
        # SGLang gives its most probable tokens before the filters; at each place those take the same off all.
        ids, values = keep_allowed(sampling_mask, ids, values + (filtered - logprobs)[:, None])
        logprobs = filtered
    topk = with_sampled(ids, values, tokens, logprobs) if k else (None, None)
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
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            self.junk(answer, "an object with output_ids and meta_info")
        self._answer: dict[str, Any] = answer
        self._meta: dict[str, Any] = answer["meta_info"]

    def _field(self, name: str, cause: str | None = None) -> Any:
        return self.present(self._meta, name, f"meta_info.{name}", cause)

    def complete(self) -> bool:
        """Whether all that was asked for is there. SGLang sends less of a request that it aborts in its queue."""
        wanted = ["output_token_logprobs", "weight_versions", "prompt_tokens", "completion_tokens"]
        wanted += ["routed_experts"] if self._request.routing is not None else []
        wanted += [_SETS, _FILTERED] if self._request.params.return_sampling_mask else []
        has_prompt = self._answer.get("prompt_token_ids") is not None
        return has_prompt and all(self._meta.get(name) is not None for name in wanted)

    def _reason(self) -> dict[str, Any]:
        reason = self._field("finish_reason")
        return {"type": reason} if isinstance(reason, str) else self.mapping(reason, "meta_info.finish_reason")

    def finish_reason(self) -> FinishReason:
        """``stop``, ``length`` or ``abort``."""
        kind = self._reason().get("type")
        return self.finish(kind, "meta_info.finish_reason")

    def tokens(self) -> NDArray[np.int32]:
        """[R]"""
        return self.ids(self.present(self._answer, "output_ids", "output_ids"), "output_ids")

    def name(self) -> Echo:
        """What every answer says, that of a request which was aborted in the queue too."""
        return Echo(request_id=own_id(self.text(self._field("id"), "meta_info.id")))

    def echo(self, best_ids: NDArray[np.int32], best_logprobs: NDArray[np.float32]) -> Echo:
        """What a complete answer says of itself; both arrays [R]."""
        counts = {n: self.integer(self._field(n), f"meta_info.{n}") for n in ("prompt_tokens", "completion_tokens")}
        prompt = self.present(self._answer, "prompt_token_ids", "prompt_token_ids")
        matched = self._reason().get("matched")
        return Echo(
            request_id=self.name().request_id,
            prompt_token_ids=tuple(self.integers(prompt, "prompt_token_ids")),
            prompt_length=counts["prompt_tokens"],
            response_length=counts["completion_tokens"],
            matched_stop=matched if type(matched) is int else None if matched is None else str(matched)[:80],
            best_token_ids=best_ids,
            best_logprobs=best_logprobs,
        )

    def logprobs(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """[R], of the sampled tokens."""
        name = "meta_info.output_token_logprobs"
        values, ids = self.columns(self._field("output_token_logprobs"), 2, name)
        if ids != tokens.tolist():
            self.refuse(name, "belongs to other tokens than output_ids")
        return never_below(self.floats(values, name), _NEVER)

    def sampling_mask(self, length: int) -> SamplingMask:
        """Of R tokens, the ids that the filters left."""
        value = self._field(_SETS, f"SGLang has it since 0.5.21. If it is newer, {_LOST}")
        return self.sets(value, length, f"meta_info.{_SETS}")

    def filtered_logprobs(self, length: int) -> NDArray[np.float32]:
        """[R], of the sampled tokens under the softmax over their sampling masks."""
        name = f"meta_info.{_FILTERED}"
        values = self.floats(self._field(_FILTERED, f"SGLang has it since 0.5.21. If it is newer, {_LOST}"), name)
        if len(values) != length:
            self.refuse(name, f"has {len(values)} numbers, expected {length}, one a token")
        return values

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Spans that cover the response."""
        cause = f"SGLang has it since 0.5.19; update the server. If it is newer, {_LOST}"
        return self.spans(self._field("weight_versions", cause), length, "meta_info.weight_versions")

    def candidates(self, length: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The most probable tokens and their log-probabilities, both [R, max(K, 1)]."""
        k = max(self._request.params.topk_logprobs, 1)
        name = "meta_info.output_top_logprobs"
        if "output_top_logprobs_val_flat_b64" in self._meta:
            ids, values = self._flat_candidates()
        else:
            rows = self.rows(self._field("output_top_logprobs"), name)
            if any(not isinstance(row, list) or len(row) != k for row in rows):
                self.refuse(name, f"has a row that is not an array of {k} tokens")
            pairs = self.columns([entry for row in rows for entry in row], 2, name)
            ids = self.ids(pairs[1], name).reshape(-1, k)
            values = self.floats(pairs[0], name).reshape(-1, k)
        if ids.shape != (length, k) or values.shape != ids.shape:
            self.refuse(name, f"has shape {list(ids.shape)}, expected [{length}, {k}]")
        return ids, never_below(values, _NEVER)

    def _flat_candidates(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        name = "output_top_logprobs"
        shape = self.integers(self._field(f"{name}_shape"), f"meta_info.{name}_shape")
        formats = [self._field(f"{name}_{part}_flat_b64_dtype") for part in ("idx", "val")]
        if formats != ["int32", "float32"]:
            self.refuse(f"meta_info.{name}_*_flat_b64_dtype", f"is {shown(formats)}, expected int32 and float32")
        fields = [(f"{name}_idx_flat_b64", "<i4"), (f"{name}_val_flat_b64", "<f4")]
        ids, values = (self.packed(self._field(field), dtype, f"meta_info.{field}") for field, dtype in fields)
        if len(shape) != 2 or not ids.size == values.size == shape[0] * shape[1]:
            self.refuse(f"meta_info.{name}", f"has {ids.size} ids and {values.size} values, expected {shown(shape)}")
        return ids.reshape(shape).astype(np.int32), values.reshape(shape).astype(np.float32)

    def routed_experts(self, response: int) -> Tensor | None:
        """[P + R - 1 - start, L, k] in the dtype of routes, dense layers marked missing."""
        shape = self._request.routing
        if shape is None:
            return None
        name = "meta_info.routed_experts"
        cause = f"start the server with --enable-return-routed-experts. If it was started so, {_LOST}"
        flat = self.packed(self._field("routed_experts", cause), "<i4", name)
        rows = len(self._request.token_ids) + response - 1 - self._request.routing_start
        if flat.size != rows * shape.num_layers * shape.topk:
            self.refuse(
                name,
                f"holds {flat.size} numbers, expected {rows} positions x {shape.num_layers} layers x {shape.topk} "
                "experts a token: the server runs another model, or drops positions",
            )
        if flat.size and not 0 <= flat.min() <= flat.max() < shape.num_experts:
            found = f"names experts {flat.min()} to {flat.max()}"
            self.refuse(name, f"{found}; the model has {shape.num_experts}, counted from 0")
        routes = torch.from_numpy(flat.reshape(rows, shape.num_layers, shape.topk).copy())
        try:
            return compact_routes(routes, shape, tokens=rows, request=name)
        except ValueError as error:
            self.refuse(name, str(error).removeprefix(f"{name}: "))
