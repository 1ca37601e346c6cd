"""Requests and responses of SGLang's ``/generate``, for 0.5.19 and later."""

import re
from collections.abc import Mapping, Sequence
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

_LOWEST = float(np.finfo(np.float32).min) / 2
"""Threshold above the lowest float32, which SGLang writes for -inf, since JSON has no infinity."""
_SAMPLING_MASK = "output_token_sampling_mask"
_SAMPLING_LOGPROBS = "output_token_sampling_logprobs"
_MISSING = (
    "the request asked for it, so something between here and the server drops fields (sglang-router re-serializes "
    "requests and responses): give the URLs of the servers themselves"
)


def wire_id(request_id: str) -> str:
    """Return the ``rid`` of a request.

    SGLang aborts every request whose id starts with the given one. The length in front keeps one id from being the
    prefix of another.
    """
    return f"{len(request_id)}:{request_id}"


def parse_wire_id(rid: str) -> str:
    """Return the request that a ``rid`` belongs to; the ``rid`` itself if this trainer did not make it."""
    request_id = rid.partition(":")[2]
    return request_id if wire_id(request_id) == rid else rid


def parse_engine_version(version: object) -> tuple[int, ...]:
    """Return the version of SGLang: ``0.5.15.post1`` as (0, 5, 15)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(int(part) for part in match.groups()) if match else (0,)


def sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the ``sampling_params`` of a request.

    With filters and without sampling masks, SGLang's log-probabilities are those before the filters. Such responses
    must not be trained on.
    """
    return common_sampling_params(params, stop_token_ids) | {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": 0,
        "top_k": params.top_k or -1,
        # Used only by a server with --enable-deterministic-inference.
        "sampling_seed": params.seed,
    }


def generate_body(request: GenerateRequest, *, flat: bool, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of ``/generate`` for the base weights, or for a LoRA adapter of the server.

    ``flat`` asks for the flat Top-K encoding of responses (0.5.22).
    """
    body: dict[str, Any] = {
        "rid": wire_id(request.request_id),
        "input_ids": list(request.token_ids),
        "sampling_params": sampling_params(request.params, request.stop_token_ids),
        "return_logprob": True,
        # Log-probabilities of the prompt are not wanted: SGLang returns those at temperature 1.
        "logprob_start_len": -1,
        # The most probable token is a witness: log-probabilities that were shifted or scaled do not fit it.
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
        # "selected": only the sampled token's log-probability under the softmax over the allowed ids.
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body | _Reader.column_request(request.params)


def decode_generation(response: object, request: GenerateRequest, url: str) -> Generation:
    """Read the response to ``generate_body``."""
    reader = _Reader(response, request, url)
    reason = reader.finish_reason()
    if reason == FinishReason.ABORT and not reader.is_complete():
        return Generation.empty(reason, reader.echo_request_id())
    tokens = reader.tokens()
    if not len(tokens):
        return Generation.empty(reason, reader.echo_request_id())
    logprobs = reader.logprobs(tokens)
    candidates = reader.candidates(len(tokens))
    sampling_mask = None
    if request.params.return_sampling_mask:
        sampling_mask = reader.sampling_mask(len(tokens))
        filtered = reader.sampling_logprobs(len(tokens))
        # SGLang's candidates are those before the filters. Filters shift all log-probabilities of a position alike.
        shifted = candidates.logprobs + (filtered - logprobs)[:, None]
        candidates = apply_sampling_mask(sampling_mask, Candidates(candidates.ids, shifted))
        logprobs = filtered
    return reader.generation(tokens, logprobs, candidates, sampling_mask)


class _Reader(GenerationReader):
    """Reader for one response of ``/generate``."""

    column_fields: ClassVar[Mapping[str, ColumnField]] = {}
    path = "meta_info"
    version_cause = f"SGLang has it since 0.5.19; update the server. If it is newer, {_MISSING}"
    mask_fields = (_SAMPLING_MASK, _SAMPLING_LOGPROBS)

    def __init__(self, response: object, request: GenerateRequest, url: str) -> None:
        super().__init__(request, url, _MISSING)
        if not isinstance(response, dict) or not isinstance(response.get("meta_info"), dict):
            self.reject_body(response, "an object with output_ids and meta_info")
        self.response = response
        self.parent = response["meta_info"]

    def is_complete(self) -> bool:
        """Return True if no requested field is missing. SGLang sends fewer if it aborts in its queue."""
        names = ("output_token_logprobs", "weight_versions", "prompt_tokens", "completion_tokens")
        return self.response.get("prompt_token_ids") is not None and self.has_requested_fields(*names)

    def _finish_reason_object(self) -> dict[str, Any]:
        reason = self.field("finish_reason")
        return {"type": reason} if isinstance(reason, str) else self.read_object(reason, "meta_info.finish_reason")

    def finish_reason(self) -> FinishReason:
        return self.read_finish_reason(self._finish_reason_object().get("type"), "meta_info.finish_reason")

    def tokens(self) -> NDArray[np.int32]:
        return self.read_ids(self.require(self.response, "output_ids", "output_ids"), "output_ids")

    def echo_request_id(self) -> Echo:
        return Echo(request_id=parse_wire_id(self.read_string(self.field("id"), "meta_info.id")))

    def _counts(self) -> tuple[Mapping[str, Any], str]:
        return self.parent, self.path

    def _stop_reason(self) -> object:
        return self._finish_reason_object().get("matched")

    def logprobs(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the log-probabilities of the sampled tokens, [R]."""
        field = "meta_info.output_token_logprobs"
        values, ids = self.read_columns(self.field("output_token_logprobs"), 2, field)
        if ids != tokens.tolist():
            self.reject(field, "belongs to other tokens than output_ids")
        return restore_infinity(self.read_float32(values, field), _LOWEST)

    def sampling_mask(self, length: int) -> SamplingMask:
        """Return the token ids that the sampling filters allowed for each of R tokens."""
        value = self.field(_SAMPLING_MASK, f"SGLang has it since 0.5.21. If it is newer, {_MISSING}")
        return self.read_sampling_mask(value, length, f"meta_info.{_SAMPLING_MASK}")

    def sampling_logprobs(self, length: int) -> NDArray[np.float32]:
        """Return the log-probabilities of the sampled tokens under the softmax over their allowed ids, [R]."""
        field = f"meta_info.{_SAMPLING_LOGPROBS}"
        value = self.field(_SAMPLING_LOGPROBS, f"SGLang has it since 0.5.21. If it is newer, {_MISSING}")
        values = self.read_float32(value, field)
        if len(values) != length:
            self.reject(field, f"has {len(values)} numbers, expected {length}, one a token")
        return values

    def candidates(self, length: int) -> Candidates:
        """Return the most probable tokens and their log-probabilities, both [R, max(K, 1)]."""
        k = max(self._request.params.topk_logprobs, 1)
        field = "meta_info.output_top_logprobs"
        if "output_top_logprobs_val_flat_b64" in self.parent:
            ids, values = self._flat_candidates()
        else:
            rows = self.read_array(self.field("output_top_logprobs"), field)
            if any(not isinstance(row, list) or len(row) != k for row in rows):
                self.reject(field, f"has a row that is not an array of {k} tokens")
            pairs = self.read_columns([entry for row in rows for entry in row], 2, field)
            ids = self.read_ids(pairs[1], field).reshape(-1, k)
            values = self.read_float32(pairs[0], field).reshape(-1, k)
        if ids.shape != (length, k) or values.shape != ids.shape:
            self.reject(field, f"has shape {list(ids.shape)}, expected [{length}, {k}]")
        return Candidates(ids, restore_infinity(values, _LOWEST))

    def _flat_candidates(self) -> Candidates:
        name = "output_top_logprobs"
        shape = self.read_integers(self.field(f"{name}_shape"), f"meta_info.{name}_shape")
        formats = [self.field(f"{name}_{part}_flat_b64_dtype") for part in ("idx", "val")]
        if formats != ["int32", "float32"]:
            self.reject(f"meta_info.{name}_*_flat_b64_dtype", f"is {shorten(formats)}, expected int32 and float32")
        ids = self._packed_field(f"{name}_idx_flat_b64", "<i4")
        values = self._packed_field(f"{name}_val_flat_b64", "<f4")
        if len(shape) != 2 or not ids.size == values.size == shape[0] * shape[1]:
            self.reject(f"meta_info.{name}", f"has {ids.size} ids and {values.size} values, expected {shorten(shape)}")
        return Candidates(ids.reshape(shape).astype(np.int32), values.reshape(shape).astype(np.float32))

    def _packed_field(self, name: str, dtype: str) -> NDArray[Any]:
        return self.read_packed_array(self.field(name), dtype, f"meta_info.{name}")

    def routed_experts(self, response_length: int) -> Tensor | None:
        shape = self._request.routing
        if shape is None:
            return None
        field = "meta_info.routed_experts"
        cause = f"start the server with --enable-return-routed-experts. If it was started so, {_MISSING}"
        flat = self.read_packed_array(self.field("routed_experts", cause), "<i4", field)
        rows = self.num_route_rows(response_length)
        if flat.size != rows * shape.num_layers * shape.topk:
            self.reject(
                field,
                f"holds {flat.size} numbers, expected {rows} positions x {shape.num_layers} layers x {shape.topk} "
                "experts a token: the server runs another model, or drops positions",
            )
        # Checked before the narrow dtype, in which an id out of range could wrap around.
        if flat.size and not 0 <= flat.min() <= flat.max() < shape.num_experts:
            detail = f"names experts {flat.min()} to {flat.max()}; the model has {shape.num_experts}, counted from 0"
            self.reject(field, detail)
        routes = torch.from_numpy(flat.reshape(rows, shape.num_layers, shape.topk).copy())
        return self.compact(routes, shape, field, response_length)
