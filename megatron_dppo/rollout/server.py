"""One inference server over HTTP, as the pool and the weight sync see it; SGLang and vLLM are two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from megatron_dppo.types import SamplingParams, VersionSpan


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Tokens to continue."""

    request_id: str
    token_ids: tuple[int, ...]
    """[P] the prompt, and what was generated before when a partial rollout goes on"""
    params: SamplingParams
    """``max_new_tokens`` is what is left of it"""
    routed_experts: bool = False
    """also report the routers' choices"""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a server returned. R new tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[R] at the sampling temperature"""
    finish_reason: Literal["stop", "length", "abort"]
    """``abort``: stopped from outside; the tokens so far are good"""
    versions: tuple[VersionSpan, ...]
    """which weights sampled which of the R tokens, without gaps"""
    topk_token_ids: Tensor | None = field(default=None, compare=False)
    """[R, K+1] int32, as in ``Completion``"""
    topk_logprobs: Tensor | None = field(default=None, compare=False)
    """[R, K+1] float32"""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """[P + R - 1, L, k] uint8 or int16, as in ``Completion``"""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    engine: Literal["sglang", "vllm"]
    engine_version: str
    model: str
    policy_version: int
    """-1 = not one of ours (the weights that the server started with)"""
    max_context: int
    world_size: int
    """ranks that take part in a weight transfer (tensor times data parallel size)"""


class InferenceServer(Protocol):
    """Every call has a deadline and raises ``ServerError`` (unreachable, too slow, refused) with the URL in it."""

    url: str

    async def health(self) -> bool:
        """Whether it answers and can generate."""

    async def info(self) -> ServerInfo:
        """What it is."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a sequence."""

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; they return what they have, as ``abort``."""

    async def pause(self) -> None:
        """Stop generating; running requests are kept and go on, under recomputed KV caches, after ``resume``."""

    async def resume(self) -> None:
        """Generate again."""

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder that the server can read; no stale KV or prefix cache is left."""

    async def begin_update(self) -> None:
        """Open a series of ``receive_*`` calls."""

    async def receive_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take some weights by value, full tensors by Hugging Face name (same host)."""

    async def join_group(self, host: str, port: int, rank_offset: int, world_size: int, backend: str) -> None:
        """Join the trainer's broadcast group as ranks from ``rank_offset``; returns when all have joined."""

    async def receive_broadcast(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Receive one flattened bucket over the group; the trainer broadcasts while this call is under way."""

    async def end_update(self, version: int) -> None:
        """Close the series: from here on the server has exactly ``version``, without stale caches."""

    async def leave_group(self) -> None:
        """Leave the broadcast group."""

    async def checksum(self) -> str:
        """A digest of the weights in use: equal servers with equal weights give the same."""

    async def close(self) -> None:
        """Free connections (the server goes on)."""
