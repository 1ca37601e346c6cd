"""One inference server over HTTP, as the pool and the weight sync see it; SGLang and vLLM are two of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.rollout.handles import Handle
from megatron_dppo.rollout.weight_sums import RankSums, WeightLayout
from megatron_dppo.types import FinishReason, ResponseColumns, RoutingShape, SamplingParams, VersionSpan


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Tokens to continue."""

    request_id: str
    """unique among the running requests of a server"""
    token_ids: tuple[int, ...]
    """[P] the prompt, and what was generated before when a partial rollout goes on"""
    params: SamplingParams
    """``max_new_tokens`` is what is left of it; ``seed`` belongs to this request: siblings need different ones"""
    stop_token_ids: tuple[int, ...] = ()
    """tokens after which the response is complete, besides those that the server takes from its model folder"""
    routing: RoutingShape | None = None
    """also report the routers' choices, which have this shape; None = not wanted"""
    routing_start: int = 0
    """the first position whose choices are wanted: those before it are known when a partial rollout goes on"""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """What a server itself says of its answer; None = it does not say it."""

    request_id: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    """[P] what it read"""
    prompt_length: int | None = None
    """P"""
    response_length: int | None = None
    """R"""
    ended_by: int | str | None = None
    """the end token that it found, for ``stop``"""
    best_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)
    """[R] the log-probability of the most probable token, also where no Top-K was asked for"""
    best_token_ids: NDArray[np.int32] | None = field(default=None, compare=False)
    """[R] that token"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation(ResponseColumns):
    """What a server returned. R new tokens.

    Routes are ``[P + R - 1 - routing_start, L, k]``: row i belongs to position ``routing_start + i`` of prompt and
    response. A column is None when it is not wanted, and sampling masks and routes also when no token was generated.
    """

    token_ids: Tensor
    """[R] int32"""
    logprobs: Tensor
    """[R] float32, at the sampling temperature"""
    finish_reason: FinishReason
    """``abort``: stopped from outside; the tokens so far are good"""
    versions: tuple[VersionSpan, ...]
    """which weights sampled which of the R tokens, without gaps; version -1 = weights that are not one of ours"""
    echo: Echo | None = None
    """None only from a server in this process; answers over HTTP always have one"""

    @staticmethod
    def empty(reason: FinishReason, echo: Echo | None = None) -> Generation:
        """Without a token: of a request that was stopped before its first one."""
        nothing = torch.empty(0)
        return Generation(token_ids=nothing.int(), logprobs=nothing, finish_reason=reason, versions=(), echo=echo)


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    engine: Literal["sglang", "vllm"]
    engine_version: str
    model: str
    policy_version: int
    """-1 = not one of ours: the weights that the server started with, or an update that was begun and never ended"""
    max_context: int
    world_size: int
    """ranks that take part in a weight transfer"""


def transfer_group_name(host: str, port: int) -> str:
    """Name of the process group of a weight transfer whose store is at ``host:port``."""
    return f"megatron_dppo:{host}:{port}"


class InferenceServer(Protocol):
    """Every call has a deadline and raises ``ServerError`` (unreachable, too slow, refused) with the URL in it.

    One update of the weights, by the caller: ``pause``; ``wake_weights``; ``begin_update``; for each bucket
    ``receive_tensors``, ``receive_handles`` or ``receive_broadcast``; ``end_update``; ``resume``.
    From ``begin_update`` to ``end_update`` the server reports version -1, so that a caller which dies in between never
    leaves half of the weights under a version.
    """

    url: str

    async def health(self) -> bool:
        """Whether it answers and, unless this client paused it, can generate; never raises."""

    async def alive(self) -> bool:
        """Whether it answers at all, soon: a cheap call that costs a busy server nothing; never raises."""

    async def info(self) -> ServerInfo:
        """What it is. As quick to fail as ``alive``."""

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """The server's own tokens of a text, no special ones added; None = it has no tokenizer."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence."""

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; they return what they have, as ``abort``.

        Call it before ``pause``, not after: of requests that it has put back into its queue a paused engine returns
        less than was sampled, often nothing. And it reaches only what the engine already has: requests that came while
        it was paused wait before it and go on after ``resume``. Cancel the ``generate`` of those.
        """

    async def pause(self) -> None:
        """Stop generating; new requests wait for ``resume``.

        Running requests are kept and go on after ``resume`` with caches that are computed again, or, where the engine
        cannot do that, return what they have as ``abort``. Of a kept request the routers' choices come from the new
        computation too: who wants those of the weights that sampled each token calls ``abort`` first.
        """

    async def resume(self) -> None:
        """Generate again."""

    async def release_memory(self) -> None:
        """End all requests, and give up the memory of weights and key-value cache; again, it does nothing.

        From here on the server reports version -1 and generates nothing, until an update of the weights has ended: it
        begins with ``wake_weights``, and ``end_update`` or ``update_from_disk`` take the memory of the cache.
        """

    async def wake_weights(self) -> None:
        """Take memory for weights that are to be sent now, where it was released, by whatever client."""

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder that the server can read; no stale KV or prefix cache is left.

        Pauses and resumes by itself where the caller has not paused. When the folder cannot be read at all, the old
        weights go on to be served under the old version.
        """

    async def update_adapter(self, folder: str, version: int) -> None:
        """Load adapters in PEFT's format in place of those before, while paused; all requests of clients with
        ``adapter`` are answered with them. The base weights stay."""

    async def begin_update(self) -> None:
        """Open a series of ``receive_*`` calls, after ``pause``; one that was left open before is closed first."""

    async def receive_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take some weights by value, full tensors by Hugging Face name (same host)."""

    async def receive_handles(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        """Read one flattened bucket from memory of other processes on the same device (same host).

        A handle for each rank of the server, which none but this rank reads. When the call returns, nothing of the
        memory is in use.
        """

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """Join the trainer's broadcast group as ranks from ``rank_offset``; returns when all have joined.

        Trainer and servers use ``transfer_group_name(host, port)`` as the group's name: a port that was not used
        before makes a group that no earlier, broken one can be mixed up with.
        """

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Receive one flattened bucket over the group; the trainer broadcasts while this call is under way.

        A server may answer before the bucket is there and loaded: the next call, or ``end_update``, fails then if that
        fails. Calls go one after another, in the order of the broadcasts.
        """

    async def end_update(self, version: int) -> None:
        """Close the series: from here on the server has exactly ``version``, without stale caches."""

    async def leave_group(self) -> None:
        """Leave the broadcast group."""

    async def weight_layout(self) -> WeightLayout:
        """How its tensors come from those that it is sent."""

    async def weight_sums(self) -> tuple[RankSums, ...]:
        """Digests of the weights in use, equal for equal weights on servers of one engine version and layout."""

    async def close(self) -> None:
        """Free connections (the server goes on)."""


Ask = Callable[[InferenceServer, GenerateRequest], Awaitable[Generation]]
"""Has a server continue a sequence, and gives its checked answer; raises as ``InferenceServer.generate``, and
``ContractViolation`` where the answer cannot be what it says it is"""
