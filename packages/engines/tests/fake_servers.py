"""Inference servers in this process that sample by a rule, with each way of going wrong that a pool has to bear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from columns import ids, logs
from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.responses import VersionSpan
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.server import GenerateRequest, Generation, ServerInfo
from megatron_dppo_engines.servers.contract import Contract

SHAPE = RoutingShape(num_layers=2, num_experts=8, topk=2)
END = 2
VOCAB = 200
CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(END,))
Sample = Callable[[GenerateRequest, int], int]
"""(request, position in the whole sequence) -> token"""


def logprob(position: int, token: int, version: int) -> float:
    """Return a fake server's log-probability of a token, above fp32's least, -104. A test computes it too."""
    return -(2 + position / 256 + token / 4096 + version / 8)


def routes(start: int, end: int, version: int) -> torch.Tensor:
    """[end - start, 2, 2] uint8 of positions from ``start``; the version is in them."""
    rows = torch.tensor([[[p % 4, 4 + version % 4]] * 2 for p in range(start, end)], dtype=torch.uint8)
    return rows.reshape(-1, SHAPE.num_layers, SHAPE.topk)


def topk_ids(tokens: Sequence[int], k: int) -> torch.Tensor:
    """[R, k + 1]: the sampled token is the most probable one, the next ones follow it in the vocabulary."""
    result = torch.tensor(tokens)[:, None] + torch.arange(k + 1)
    result[:, k] = -1
    return result.int()


def topk_logprobs(logprobs: Sequence[float], k: int) -> torch.Tensor:
    """[R, k + 1]"""
    values = torch.tensor(logprobs)[:, None] - torch.arange(k + 1)
    values[:, k] = 0.0
    return values


class FakeServer:
    """Samples one token each ``token_seconds``, until the end token or the limit.

    Set ``dead`` (no answer), ``hung`` (no answer and no end), ``reported`` (another version than its weights').
    """

    def __init__(self, url: str, *, token_seconds: float = 0.0, sample: Sample | None = None) -> None:
        self.url, self.token_seconds = url, token_seconds
        self.sample: Sample = sample or (lambda request, position: 5 + position % 3)
        self.version, self.reported = -1, None
        self.dead = self.hung = False
        self.refuses: set[str] = set()
        self.requests: list[GenerateRequest] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.running = self.most = 0
        self._stop: dict[str, asyncio.Event] = {}

    async def _answer(self) -> None:
        while self.hung:
            await asyncio.sleep(0.005)
        if self.dead:
            raise ServerError(self.url, "Connection refused")

    async def alive(self) -> bool:
        return not (self.dead or self.hung)

    async def health(self) -> bool:
        return not (self.dead or self.hung)

    async def info(self) -> ServerInfo:
        if self.hung:
            raise ServerError(self.url, "no response within 1 seconds")
        await self._answer()
        version = self.version if self.reported is None else self.reported
        return ServerInfo(
            engine="sglang", engine_version="0", model="m", policy_version=version, max_context=99, world_size=1
        )

    async def abort(self, request_id: str | None = None) -> None:
        await self._answer()
        for name in list(self._stop) if request_id is None else [request_id]:
            self.aborted.append(name)
            if name in self._stop:
                self._stop[name].set()

    async def generate(self, request: GenerateRequest) -> Generation:
        await self._answer()
        self.requests.append(request)
        if request.request_id in self.refuses:
            raise ServerError(self.url, "too long", 400)
        self.running += 1
        self.most = max(self.most, self.running)
        stop = self._stop[request.request_id] = asyncio.Event()
        try:
            return await self._sample(request, stop)
        finally:
            self.running -= 1
            del self._stop[request.request_id]

    async def _sample(self, request: GenerateRequest, stop: asyncio.Event) -> Generation:
        tokens: list[int] = []
        versions: list[int] = []
        reason: Any = "length"
        while len(tokens) < request.params.max_new_tokens:
            await asyncio.sleep(self.token_seconds)
            await self._answer()
            if stop.is_set():
                reason = "abort"
                break
            versions.append(self.version)
            tokens.append(self.sample(request, len(request.token_ids) + len(tokens)))
            if tokens[-1] in (END, *request.stop_token_ids):
                reason = "stop"
                break
        self.finished.append(request.request_id)
        return self._generation(request, tokens, versions, reason)

    def _generation(self, request: GenerateRequest, tokens: list[int], versions: list[int], reason: Any) -> Generation:
        first, spans = len(request.token_ids), list[VersionSpan]()
        for i, version in enumerate(versions):
            if spans and spans[-1].policy_version == version:
                spans[-1] = spans[-1]._replace(end=i + 1)
            else:
                spans.append(VersionSpan(version, i, i + 1))
        k, rows = request.params.topk_logprobs, len(tokens)
        wanted = request.routing is not None and rows > 0
        logprobs = [logprob(first + i, t, v) for i, (t, v) in enumerate(zip(tokens, versions, strict=True))]
        return Generation(
            token_ids=ids(tokens),
            logprobs=logs(logprobs),
            finish_reason=reason,
            versions=tuple(spans),
            topk_token_ids=topk_ids(tokens, k) if k and rows else None,
            topk_logprobs=topk_logprobs(logprobs, k) if k and rows else None,
            routed_experts=routes(request.routing_start, first + rows - 1, versions[-1]) if wanted else None,
        )

    async def close(self) -> None:
        """Nothing to free."""
