"""Protocol of one inference server over HTTP, which the pool and the weight sync use; SGLang and vLLM implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo_engines.responses import FinishReason, ResponseColumns, SamplingParams, VersionSpan
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.sampling_sums import RankSums
from megatron_dppo_engines.shared_memory import Handle
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Request to continue a sequence of tokens."""

    request_id: str
    """Identifier, unique among the running requests of a server."""
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens generated so far when a partial rollout continues. Shape [P]."""
    params: SamplingParams
    """Sampling parameters: ``max_new_tokens`` counts new tokens only, and ``seed`` differs between siblings."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, in addition to those of the server's model folder."""
    routing: RoutingShape | None = None
    """Shape of the routes to return. None: no routes."""
    routing_start: int = 0
    """First position whose routes are returned; a partial rollout already has the earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Fields that a server repeats in its response, to check it against the request.

    None: the server omits the field.
    """

    request_id: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    """Prompt that the server read. Shape [P]."""
    prompt_length: int | None = None
    """Number of prompt tokens, P."""
    response_length: int | None = None
    """Number of new tokens, R."""
    matched_stop: int | str | None = None
    """End token or stop string that ended the response with ``stop``."""
    best_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)
    """Log-probability of the most probable token, also without a requested Top-K. Shape [R]."""
    best_token_ids: NDArray[np.int32] | None = field(default=None, compare=False)
    """Most probable token. Shape [R]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation(ResponseColumns):
    """Response of a server to one request: R new tokens.

    Routes are ``[P + R - 1 - routing_start, L, k]``: row i belongs to position ``routing_start + i`` of prompt and
    response. A column is None if it was not requested; sampling masks and routes also if no token was generated.
    """

    token_ids: Tensor
    """New tokens. Shape [R], int32."""
    logprobs: Tensor
    """Log-probabilities at the sampling temperature. Shape [R], float32."""
    finish_reason: FinishReason
    """Reason of the end. ``abort``: stopped from outside; the tokens so far are valid."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the R tokens, without gaps. Version -1: weights that no sync has sent."""
    echo: Echo | None = None
    """Fields to check. None only from an engine in this process; responses over HTTP always have them."""
    ranks: RankSums = field(default_factory=RankSums)
    """Ranks of the tokens in the distribution that the server reports; all 0 if they were not computed."""

    @staticmethod
    def empty(reason: FinishReason, echo: Echo | None = None) -> Generation:
        """Return the generation of a request that was aborted before its first token."""
        nothing = torch.empty(0)
        return Generation(token_ids=nothing.int(), logprobs=nothing, finish_reason=reason, versions=(), echo=echo)


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Identity and state that a server reports."""

    engine: Literal["sglang", "vllm"]
    engine_version: str
    model: str
    policy_version: int
    """Version of the weights. -1: the weights that the server started with, or an update that never ended."""
    max_context: int
    world_size: int
    """Number of ranks that take part in a weight transfer."""


def transfer_group_name(host: str, port: int) -> str:
    """Return the name of the process group of a weight transfer whose store is at ``host:port``."""
    return f"megatron_dppo:{host}:{port}"


class InferenceServer(Protocol):
    """Client of one inference server.

    Every call has a deadline and raises ``ServerError`` with the URL if the server is unreachable, too slow, or rejects
    the call.

    The caller updates the weights in this order: ``pause``; ``wake_weights``; ``begin_update``; for each bucket
    ``receive_handles`` or ``receive_broadcast``; ``end_update``; ``resume``.
    From ``begin_update`` to ``end_update`` the server reports version -1. A caller that dies in between therefore never
    leaves incomplete weights under a valid version.
    """

    url: str

    async def health(self) -> bool:
        """Return True if the server responds and, unless this client paused it, can generate. Never raises."""

    async def alive(self) -> bool:
        """Return True if the server responds soon to a call that is cheap for a busy server. Never raises."""

    async def info(self) -> ServerInfo:
        """Return the server's identity and state. Fails as quickly as ``alive``."""

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the server's tokens of a text without special tokens, or None if it has no tokenizer."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence."""

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all if None; each returns its tokens so far with ``abort``.

        Call it before ``pause``, not after: a paused engine returns less than was sampled, often nothing, for requests
        that it has put back into its queue. And ``abort`` reaches only requests that the engine has already accepted.
        Requests that arrive during a pause wait and continue after ``resume``; cancel their ``generate`` calls instead.
        """

    async def pause(self) -> None:
        """Stop generating; new requests wait for ``resume``.

        Running requests are kept and continue after ``resume`` with recomputed caches. Engines that cannot do so return
        the tokens so far with ``abort``. The routes of a kept request come from the recomputation, too. To get the
        routes of the weights that sampled each token, call ``abort`` first.
        """

    async def resume(self) -> None:
        """Generate again."""

    async def release_memory(self) -> None:
        """End all requests and release the memory of weights and key-value cache; a second call does nothing.

        Afterwards the server reports version -1 and generates nothing until an update of the weights has ended. The
        update starts with ``wake_weights``; ``end_update`` or ``update_from_disk`` allocate the cache.
        """

    async def wake_weights(self) -> None:
        """Allocate memory for weights that are about to be sent, if any client has released it."""

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder that the server can read, and drop stale KV and prefix caches.

        Pauses and resumes by itself if the caller has not paused. If the folder cannot be read at all, the server keeps
        the old weights and the old version.
        """

    async def update_adapter(self, folder: str, version: int) -> None:
        """Replace the adapters by those of a PEFT folder, while paused.

        All requests of clients with ``adapter`` use them. The base weights stay.
        """

    async def begin_update(self) -> None:
        """Open a series of ``receive_*`` calls, after ``pause``; an update that was left open is closed first."""

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """Read one flattened bucket from the memory of other processes on the same device (same host).

        Each rank of the server reads its own handle, and no other. When the call returns, the server no longer uses the
        memory.
        """

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """Join the trainer's broadcast group with ranks from ``rank_offset``; return when all ranks have joined.

        Trainer and servers use ``transfer_group_name(host, port)`` as the group's name. With an unused port, no message
        of an earlier, broken group can be mistaken for one of this group.
        """

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Receive one flattened bucket over the group; the trainer broadcasts while this call is in flight.

        A server may respond before the bucket is received and loaded. If that fails later, the next call or
        ``end_update`` fails. Calls follow each other in the order of the broadcasts.
        """

    async def end_update(self, version: int) -> None:
        """Close the series: from now on the server has exactly ``version``, without stale caches."""

    async def leave_group(self) -> None:
        """Leave the broadcast group."""

    async def weight_layout(self) -> WeightLayout:
        """Return how the server's tensors relate to those that it receives."""

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """Return digests of the weights in use: equal for equal weights on servers of one engine version and layout."""

    async def close(self) -> None:
        """Close connections; the server keeps running."""


GenerateCall = Callable[[InferenceServer, GenerateRequest], Awaitable[Generation]]
"""Function that has a server continue a sequence and returns its checked response.

Raises the errors of ``InferenceServer.generate``, and ``ContractViolation`` if the response contradicts the request.
"""
