"""Parts of the requests and responses that SGLang and vLLM have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo_engines.errors import ConfigError
from megatron_dppo_engines.responses import FinishReason, SamplingMask, SamplingParams, VersionSpan
from megatron_dppo_engines.route_checks import compact_routes
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation
from megatron_dppo_engines.servers.fields import ResponseFields

_MAX_STOP_REASON = 80
"""Characters of a stop reason that is no token id."""


class Candidates(NamedTuple):
    """The most probable tokens of each position."""

    ids: NDArray[np.int32]
    """Shape [R, K]."""
    logprobs: NDArray[np.float32]
    """Shape [R, K]."""


class ColumnField(NamedTuple):
    """Place of a column on request in the requests and responses of an engine."""

    response: str
    """Field of the response that has the numbers, one for each token."""
    request: Mapping[str, Any]
    """Fields of the request that ask for them."""


class GenerationReader(ResponseFields, ABC):
    """Reader for the response to one generation request; an engine adds where each field stands."""

    column_fields: ClassVar[Mapping[str, ColumnField]] = {}
    """Place of each column on request that the engine returns, by its field of a response."""

    path: ClassVar[str]
    """Path of the object that has most of the fields."""
    version_cause: ClassVar[str]
    """Likely cause of missing weight versions."""
    mask_fields: ClassVar[tuple[str, ...]]
    """Fields of that object with the sampling mask."""
    response: dict[str, Any]
    parent: dict[str, Any]
    """The object at ``path``."""

    def __init__(self, request: GenerateRequest, url: str, missing_cause: str) -> None:
        super().__init__(url, request.request_id, missing_cause)
        self._request = request

    def field(self, name: str, cause: str | None = None) -> Any:
        """Return a field of the object at ``path`` that must not be missing."""
        return self.require(self.parent, name, f"{self.path}.{name}", cause)

    def has_requested_fields(self, *names: str) -> bool:
        """Return True if neither ``names`` nor a field is missing that the request asks for."""
        params = self._request.params
        requested = ["routed_experts"] if self._request.routing is not None else []
        requested += [self.column_fields[name].response for name in params.columns]
        requested += self.mask_fields if params.return_sampling_mask else []
        return all(self.parent.get(name) is not None for name in (*names, *requested))

    @abstractmethod
    def finish_reason(self) -> FinishReason:
        """Return ``stop``, ``length`` or ``abort``."""

    def versions(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the spans of weight versions that cover the response."""
        spans = self.field("weight_versions", self.version_cause)
        return self.read_version_spans(spans, length, f"{self.path}.weight_versions")

    @abstractmethod
    def routed_experts(self, response_length: int) -> Tensor | None:
        """Return the routes ``[P + R - 1 - routing_start, L, k]``; None if the request did not ask for them."""

    @abstractmethod
    def echo_request_id(self) -> Echo:
        """Return the part of the echo that every response has, also if the request was aborted in the queue."""

    @abstractmethod
    def _counts(self) -> tuple[Mapping[str, Any], str]:
        """Return the object with the numbers of tokens, and its path."""

    @abstractmethod
    def _stop_reason(self) -> object:
        """Return what ended the response, as the server names it."""

    def echo(self, best_ids: NDArray[np.int32], best_logprobs: NDArray[np.float32]) -> Echo:
        """Return what a complete response reports about itself; both arguments have shape [R]."""
        prompt = self.require(self.response, "prompt_token_ids", "prompt_token_ids")
        counts, path = self._counts()
        fields = {key: f"{path}.{key}" for key in ("prompt_tokens", "completion_tokens")}
        lengths = [self.read_integer(self.require(counts, key, field), field) for key, field in fields.items()]
        return Echo(
            request_id=self.echo_request_id().request_id,
            prompt_token_ids=tuple(self.read_integers(prompt, "prompt_token_ids")),
            prompt_length=lengths[0],
            response_length=lengths[1],
            matched_stop=read_stop_reason(self._stop_reason()),
            best_token_ids=best_ids,
            best_logprobs=best_logprobs,
        )

    def generation(
        self,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        candidates: Candidates,
        sampling_mask: SamplingMask | None,
    ) -> Generation:
        """Return the response; tokens and log-probabilities are [R], candidates those after the sampling filters."""
        topk_ids, topk_logprobs = None, None
        if self._request.params.topk_logprobs:
            topk_ids, topk_logprobs = append_sampled_token(*candidates, tokens, logprobs)
        on_request: dict[str, Any] = {name: self._column(name) for name in self._request.params.columns}
        return Generation(
            token_ids=torch.from_numpy(tokens),
            logprobs=torch.from_numpy(logprobs),
            finish_reason=self.finish_reason(),
            versions=self.versions(len(tokens)),
            topk_token_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            sampling_mask=sampling_mask,
            routed_experts=self.routed_experts(len(tokens)),
            **on_request,
            # The first candidate is the most probable token: no sampled one may be above it.
            echo=self.echo(candidates.ids[:, 0], candidates.logprobs[:, 0]),
        )

    def _column(self, name: str) -> Tensor:
        field = self.column_fields[name].response
        return torch.from_numpy(self.read_float32(self.field(field), f"{self.path}.{field}"))

    @classmethod
    def column_request(cls, params: SamplingParams) -> dict[str, Any]:
        """Return the fields of a request that ask for the columns of ``params.columns``."""
        if missing := [name for name in params.columns if name not in cls.column_fields]:
            raise ConfigError(
                f"these servers do not return {', '.join(missing)}, which the loss reads. Fix: use another "
                "rollout.engine, or a loss that does not read them"
            )
        return {key: value for name in params.columns for key, value in cls.column_fields[name].request.items()}

    def num_route_rows(self, response_length: int) -> int:
        """Return the number of positions whose routes the request asks for: all tokens that are read but the last."""
        return len(self._request.token_ids) + response_length - 1 - self._request.routing_start

    def compact(self, routes: Tensor, shape: RoutingShape, field: str, response_length: int) -> Tensor:
        """Return routes in their compact dtype, with dense layers marked as missing."""
        rows = self.num_route_rows(response_length)
        try:
            return compact_routes(routes, shape, tokens=rows, request=field)
        except ValueError as error:
            self.reject(field, str(error).removeprefix(f"{field}: "))


_BASE_BYTES = 4 << 20
"""Bytes of a response that do not grow with it: fields beside the columns, or a gateway's page."""
_TOKEN_BYTES = 2048
"""Bytes of one token in all fields but those below: its id and text, in several places, and its log-probability."""
_NUMBER_BYTES = 64
"""Bytes of one number as JSON, with its brackets and blanks, or of one Top-K entry with its id."""
_ROUTE_BYTES = 8
"""Bytes of one expert's number: 5.3 as an int32 in base64, and as many as JSON."""
_MAX_VOCAB = 1 << 20
"""Ids of a sampling mask without top-k; more than the vocabulary of any model."""


def max_response_bytes(request: GenerateRequest) -> int:
    """Return the size that the response to a request cannot exceed, several times what servers send."""
    params = request.params
    num_new = params.max_new_tokens
    num_tokens = len(request.token_ids) + num_new
    numbers = num_new * (params.topk_logprobs + 2 + len(params.columns))
    num_routes = 0
    if request.routing is not None:
        num_routes = (num_tokens - request.routing_start) * request.routing.num_layers * request.routing.topk
    if params.return_sampling_mask:
        numbers += num_new * (params.top_k or _MAX_VOCAB)
    return _BASE_BYTES + num_tokens * _TOKEN_BYTES + numbers * _NUMBER_BYTES + num_routes * _ROUTE_BYTES


def common_sampling_params(params: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters that both engines name alike.

    Every parameter that shapes the distribution is sent, also at its default: a server can be started with other
    defaults.
    """
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": list(stop_token_ids),
    }


def read_stop_reason(value: object) -> int | str | None:
    """Return the token id or, shortened, the text that ended a response; None if the response names none."""
    if value is None or type(value) is int:
        return value
    return str(value)[:_MAX_STOP_REASON]


def restore_infinity(logprobs: NDArray[np.float32], lowest: float) -> NDArray[np.float32]:
    """Replace values up to ``lowest``, which an engine writes for -inf, by -inf."""
    return np.where(logprobs <= lowest, np.float32("-inf"), logprobs)


def append_sampled_token(
    ids: NDArray[np.int32], values: NDArray[np.float32], tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    """Append a slot that holds the sampled token if it is not one of the K, else -1 and 0 (see ``Completion``).

    The most probable tokens are [R, K], the sampled ones [R], and the results [R, K + 1].
    """
    sampled = tokens[:, None]
    is_outside = ~(ids == sampled).any(1, keepdims=True)
    last_id = np.where(is_outside, sampled, np.int32(-1))
    last_value = np.where(is_outside, logprobs[:, None], np.float32(0))
    return (
        torch.from_numpy(np.concatenate([ids, last_id], 1)),
        torch.from_numpy(np.concatenate([values, last_value], 1)),
    )


def apply_sampling_mask(sampling_mask: SamplingMask, candidates: Candidates) -> Candidates:
    """Remove candidates that the sampling filters do not allow; -1 and 0 fill the slots behind the others."""
    ids, values = candidates
    is_allowed = np.zeros(ids.shape, dtype=np.bool_)
    for row, allowed in enumerate(np.split(sampling_mask.ids.numpy(), sampling_mask.counts.numpy().cumsum()[:-1])):
        is_allowed[row] = np.isin(ids[row], allowed)
    # Stable, so the allowed candidates keep their order by probability.
    order = np.argsort(~is_allowed, axis=1, kind="stable")
    ids = np.where(is_allowed, ids, np.int32(-1))
    values = np.where(is_allowed, values, np.float32(0))
    return Candidates(np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1))
