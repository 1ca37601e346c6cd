"""One response from inference servers: requested until it is complete, whatever interrupts it."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_dppo.engines.servers.pool import ServerPool
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.rollout.turns import GenerateFunction, Turns, TurnsStopped, call_generate
from megatron_dppo.types import Completion, FinishReason, Prompt, RoutingShape, SamplingParams

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises; it is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect when it was the coroutine that raised
            raise

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that deals with its own errors; do not wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._started.add(future)  # the loop itself holds its tasks only weakly
        future.add_done_callback(self._started.discard)

    def cancel(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        if self._thread.is_alive():
            self.run(_cancel_all())

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            self.run(_cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class PromptRoutes:
    """What the siblings of one prompt have in common. Belongs to one event loop.

    A request for one token brings the routes, and the prompt into the server's prefix cache, before the siblings ask.

    Args:
        pool: the servers.
        prompt: of P tokens.
        params: of the responses.
        routing: the shape of routes.
        end: tokens after which a response is complete.
    """

    def __init__(
        self, pool: ServerPool, prompt: Prompt, params: SamplingParams, routing: RoutingShape, end: tuple[int, ...]
    ) -> None:
        self._pool, self._prompt, self._routing, self._end = pool, prompt, routing, end
        self._params = replace(params, max_new_tokens=1, topk_logprobs=0)
        self._known: dict[int, Tensor] = {}
        self._asking, self._numbers = asyncio.Lock(), itertools.count()

    async def by(self, version: int, name: str, affinity: str) -> Tensor | None:
        """Routes ``[P - 1, L, k]`` by the weights of a version; None = these are gone, or the request was stopped.

        That of the prompt's last token is not among them: each response reads it anew.

        Args:
            version: of the weights.
            name: begins that of a request.
            affinity: of the siblings.

        Raises:
            ServerError: see ``ServerPool.generate``.
        """
        async with self._asking:
            if version not in self._known and version == self._pool.version:
                request = GenerateRequest(
                    request_id=f"{name}-routes-{next(self._numbers)}",
                    token_ids=self._prompt.token_ids,
                    params=self._params,
                    stop_token_ids=self._end,
                    routing=self._routing,
                )
                found = await self._pool.generate(request, affinity)
                if found.routed_experts is not None:
                    self._known[found.versions[0].policy_version] = found.routed_experts[:-1].clone()
        return self._known.get(version)


_EMPTY_ANSWERS = 8
"""Times in a row that a request may be stopped from outside without a token, about 10 seconds in all."""


@dataclass(eq=False)
class InFlightResponse:
    """One response on its way."""

    prompt: Prompt
    response: GrowingResponse
    params: SamplingParams
    index: int
    """among the responses of one call: siblings get different seeds by it"""
    prompt_routes: PromptRoutes | None = None
    """of all siblings; None = each asks for all routes itself"""
    request_id: str = ""
    """of the last request"""
    stopping: bool = False
    completion: Completion | None = None
    """None = not complete"""

    @property
    def state(self) -> Completion | PartialResponse:
        """What there is of it."""
        return self.completion or self.response.state()

    def seeded(self) -> SamplingParams:
        """Parameters with the seed of the next request: no two of a run share it, but by accident."""
        key = f"{self.params.seed}/{self.index}/{self.response.parts}"
        return replace(self.params, seed=random.Random(key).getrandbits(31))


class Responder:
    """Completes responses by a pool of servers.

    Args:
        pool: the servers.
        tokenizer: decodes responses.
        end: tokens after which a response is complete.
        function: a user's ``rollout.generate``; None = one response to each prompt.
    """

    def __init__(
        self, pool: ServerPool, tokenizer: Any, end: tuple[int, ...], function: GenerateFunction | None
    ) -> None:
        self._pool, self._tokenizer, self._end, self._function = pool, tokenizer, end, function
        self._name, self._numbers = uuid.uuid4().hex[:12], itertools.count()

    async def complete(self, sample: InFlightResponse) -> None:
        """Go on until the response is complete or ``stopping`` is set.

        Raises:
            ServerError: see ``ServerPool.generate``.
            GenerateError: the user's function failed.
        """
        if sample.completion is not None:
            return
        if self._function is None:
            reason = await self._sample(sample, sample.params.max_new_tokens, ())
            if reason is not None:
                sample.completion = sample.response.completion(reason, self._tokenizer)
            return

        was_stopped = False

        async def more(limit: int, stop: tuple[int, ...]) -> FinishReason | None:
            nonlocal was_stopped
            sample.response = turns.response
            reason = await self._sample(sample, len(sample.response.tokens) + limit, stop)
            was_stopped = was_stopped or reason is None
            return reason

        turns = Turns(sample.prompt, sample.response, sample.params, self._tokenizer, more)
        try:
            completion = await call_generate(self._function, turns)
        except TurnsStopped:
            return
        if not was_stopped:  # a function that catches everything may finish what is not complete
            sample.completion = completion

    async def _sample(self, sample: InFlightResponse, length: int, stop: tuple[int, ...]) -> FinishReason | None:
        """Sample until the response is complete or has ``length`` tokens; None when it is to stop before."""
        empty = 0
        while (left := length - len(sample.response.tokens)) > 0:
            if sample.stopping:
                return None
            sample.request_id = f"{self._name}-{sample.params.seed}-{next(self._numbers)}"
            generation = await self._ask(sample, stop, left)
            sample.response.append_sampled(generation)
            if generation.finish_reason != FinishReason.ABORT:
                return generation.finish_reason
            sampled = len(generation.token_ids) > 0
            # An engine that is told to stop while it samples the end token says abort of what is complete.
            if sampled and int(generation.token_ids[-1]) in (*self._end, *stop):
                return FinishReason.STOP
            empty = 0 if sampled else empty + 1
            if empty > _EMPTY_ANSWERS:
                raise ServerError(
                    "rollout.servers",
                    f"a request was stopped from outside {empty} times without a new token; does another program send "
                    "aborts to the servers, or are they paused?",
                )
            if empty:
                await asyncio.sleep(0.02 * 2**empty)
        return FinishReason.LENGTH

    async def _ask(self, sample: InFlightResponse, stop: tuple[int, ...], limit: int) -> Generation:
        """One request; as if it had been stopped where weights that are gone read a prompt whose routes it lacks."""
        name, affinity = sample.request_id, f"{sample.prompt.prompt_id}/{sample.params.seed}"
        shared = sample.prompt_routes if sample.response.lacks_routes else None
        if shared is not None:
            await shared.by(self._pool.version, name, affinity)
        request = sample.response.next_request(
            name, sample.seeded(), (*self._end, *stop), limit, prompt_routes=shared is None
        )
        generation = await self._pool.generate(request, affinity)
        if shared is None or generation.routed_experts is None:
            return generation
        # It may have waited for its turn until there were other weights.
        routes = await shared.by(generation.versions[0].policy_version, name, affinity)
        if routes is None:
            return Generation.empty(FinishReason.ABORT)
        return replace(generation, routed_experts=torch.cat([routes, generation.routed_experts]))
