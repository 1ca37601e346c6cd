"""Requests that several tests send, and a loop to send them in."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from megatron_dppo.types import RoutingShape, SamplingParams
from megatron_dppo_engines.server import GenerateRequest, InferenceServer
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer
from tests.engines.servers import Engine

T = TypeVar("T")
_ids = itertools.count()

SHORT = tuple(range(10, 27))
LONG = tuple((7 * i) % 250 + 3 for i in range(300))
"""A prompt that fills pages of the prefix cache."""


def client(engine: Engine, *, adapter: bool = False) -> SGLangServer | VLLMServer:
    """Return a client that waits long enough for a server on a loaded machine."""
    kind: type[SGLangServer | VLLMServer] = {"sglang": SGLangServer, "vllm": VLLMServer}[engine.kind]
    return kind(engine.url, deadlines=Deadlines(alive=60, control=60, update=120, generate=120), adapter=adapter)


def call(engine: Engine, use: Callable[[InferenceServer], Awaitable[T]], *, adapter: bool = False) -> T:
    """Run ``use`` with a client of the server."""

    async def run() -> T:
        server = client(engine, adapter=adapter)
        try:
            return await use(server)
        finally:
            await server.close()

    return asyncio.run(run())


def ask(
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    topk: int = 0,
    routing: RoutingShape | None = None,
    routing_start: int = 0,
    stop: tuple[int, ...] = (),
    name: str = "",
    **filters: float,
) -> GenerateRequest:
    """A request with an id that no other has."""
    return GenerateRequest(
        request_id=f"{name or 'test'}-{next(_ids)}",
        token_ids=tuple(prompt),
        params=SamplingParams(max_new_tokens=tokens, temperature=temperature, topk_logprobs=topk, **filters),  # type: ignore[arg-type]
        stop_token_ids=stop,
        routing=routing,
        routing_start=routing_start,
    )
