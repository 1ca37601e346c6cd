"""One response from inference servers: requested until it is complete, whatever interrupts it."""

import asyncio
import itertools
import random
import threading
import uuid
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.turns import GenerateFunction, run_user_function
from megatron_dppo.types import Completion, FinishReason, Prompt, RoutingShape, SamplingParams
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.pool import ServerPool

T = TypeVar("T")

MAX_EMPTY_RESPONSES = 8
"""Aborts in a row without a new token that a request survives, about 10 seconds in all."""


class LoopThread:
    """An event loop in a thread, which runs coroutines for any thread until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine and return its result; it is cancelled if the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # has no effect if the coroutine itself raised
            raise

    def start(self, coroutine: Coroutine[object, None, None]) -> None:
        """Start a coroutine that handles its own errors, and return at once."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._started.add(future)  # the loop holds its tasks only weakly
        future.add_done_callback(self._started.discard)

    def cancel(self) -> None:
        """Cancel all running coroutines and wait until they have ended."""
        if self._thread.is_alive():
            self.run(_cancel_all())

    def close(self) -> None:
        """Cancel all running coroutines and end the thread."""
        if self._thread.is_alive():
            self.run(_cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class PromptRoutes:
    """Routes of a prompt, which its siblings share. Belongs to one event loop.

    A request for one token returns them before the siblings are requested, and fills the server's prefix cache.
    """

    def __init__(
        self,
        pool: ServerPool,
        prompt: Prompt,
        params: SamplingParams,
        routing: RoutingShape,
        end_tokens: tuple[int, ...],
    ) -> None:
        self._pool = pool
        self._prompt = prompt
        self._routing = routing
        self._end_tokens = end_tokens
        self._params = replace(params, max_new_tokens=1, topk_logprobs=0)
        self._routes_by_version: dict[int, Tensor] = {}
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()

    async def get(self, version: int, request_id: str, affinity: str) -> Tensor | None:
        """Return the routes ``[P - 1, L, k]`` under one version of the weights, for siblings with one ``affinity``.

        Each response reads the prompt's last token anew. None if the version is not current or the request was aborted.
        """
        async with self._lock:  # the first sibling sends the request, the others wait for its result
            if version not in self._routes_by_version and version == self._pool.version:
                request = GenerateRequest(
                    request_id=f"{request_id}-routes-{next(self._numbers)}",
                    token_ids=self._prompt.token_ids,
                    params=self._params,
                    stop_token_ids=self._end_tokens,
                    routing=self._routing,
                )
                generation = await self._pool.generate(request, affinity)
                if generation.routed_experts is not None:
                    # The weights may have changed while the request waited.
                    actual_version = generation.versions[0].policy_version
                    self._routes_by_version[actual_version] = generation.routed_experts[:-1].clone()
        return self._routes_by_version.get(version)


@dataclass(eq=False)
class InFlightResponse:
    """A response that is being requested."""

    prompt: Prompt
    response: GrowingResponse
    params: SamplingParams
    index: int
    """Index among the responses of one call, which gives siblings different seeds."""
    prompt_routes: PromptRoutes | None = None
    """Routes of the prompt, which all siblings share. None if each response requests all routes itself."""
    request_ids: set[str] = field(default_factory=set)
    """Ids of the requests in progress: one for each sequence that is being extended."""
    is_stopping: bool = False
    completion: Completion | None = None

    @property
    def state(self) -> Completion | PartialResponse:
        """The completion, or the tokens so far."""
        return self.completion or self.response.state()

    def seeded_params(self, response: GrowingResponse) -> SamplingParams:
        """Return the parameters with the seed of the next request of ``response`` or one of its branches."""
        key = f"{self.params.seed}/{self.index}/{response.seed_key}"
        return replace(self.params, seed=random.Random(key).getrandbits(31))


@dataclass
class Responder:
    """Completion of responses by a pool of servers. ``siblings_per_server`` None sends all siblings to one server."""

    pool: ServerPool
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    function: GenerateFunction | None
    siblings_per_server: int | None = None
    _name: str = field(default_factory=lambda: uuid.uuid4().hex[:12], init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    async def complete(self, sample: InFlightResponse) -> None:
        """Continue a response until it is complete or ``is_stopping`` is set."""
        if sample.completion is not None:
            return
        if self.function is None:
            reason = await self._sample(sample, sample.response, sample.params.max_new_tokens, ())
            if reason is not None:
                sample.completion = sample.response.completion(reason, self.tokenizer)
            return

        async def sample_turn(
            response: GrowingResponse, limit: int, stop_token_ids: tuple[int, ...]
        ) -> FinishReason | None:
            return await self._sample(sample, response, len(response.tokens) + limit, stop_token_ids)

        sample.completion = await run_user_function(
            self.function, sample.prompt, sample.response, sample.params, self.tokenizer, sample_turn
        )

    async def _sample(
        self, sample: InFlightResponse, response: GrowingResponse, length: int, stop_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        """Sample until ``response`` is complete or has ``length`` tokens; return None if it is stopped before."""
        empty_responses = 0
        while (remaining := length - len(response.tokens)) > 0:
            if sample.is_stopping:
                return None
            # Unique among all ranks, which share the servers.
            request_id = f"{self._name}-{sample.params.seed}-{next(self._numbers)}"
            sample.request_ids.add(request_id)
            try:
                generation = await self._generate(sample, response, request_id, stop_token_ids, remaining)
            finally:
                sample.request_ids.discard(request_id)
            response.append_sampled(generation)
            has_tokens = len(generation.token_ids) > 0
            # An engine that is aborted while it samples the end token reports an abort of a complete response, and one
            # that reaches the limit with the end token (SGLang) reports ``length``.
            if has_tokens and int(generation.token_ids[-1]) in (*self.end_tokens, *stop_token_ids):
                return FinishReason.STOP
            if generation.finish_reason != FinishReason.ABORT:
                return generation.finish_reason
            empty_responses = 0 if has_tokens else empty_responses + 1
            if empty_responses > MAX_EMPTY_RESPONSES:
                raise ServerError(
                    "rollout.servers",
                    f"a request was aborted {empty_responses} times without a new token, and not by this run. Check "
                    "that no other program aborts requests on the servers or pauses them",
                )
            if empty_responses:
                await asyncio.sleep(0.02 * 2**empty_responses)
        return FinishReason.LENGTH

    async def _generate(
        self,
        sample: InFlightResponse,
        response: GrowingResponse,
        request_id: str,
        stop_token_ids: tuple[int, ...],
        limit: int,
    ) -> Generation:
        """Send one request for up to ``limit`` tokens.

        It is an empty abort if weights that are no longer current read a prompt without its routes.
        """
        affinity = f"{sample.prompt.prompt_id}/{sample.params.seed}"
        if self.siblings_per_server is not None:
            affinity += f"/{sample.index // self.siblings_per_server}"
        shared_routes = sample.prompt_routes if response.lacks_routes else None
        if shared_routes is not None:
            await shared_routes.get(self.pool.version, request_id, affinity)
        request = response.next_request(
            request_id,
            sample.seeded_params(response),
            (*self.end_tokens, *stop_token_ids),
            limit,
            prompt_routes=shared_routes is None,
        )
        generation = await self.pool.generate(request, affinity)
        if shared_routes is None or generation.routed_experts is None:
            return generation
        # The request may have waited in the pool until the weights changed: the routes must be of the same version.
        routes = await shared_routes.get(generation.versions[0].policy_version, request_id, affinity)
        if routes is None:
            return Generation.empty(FinishReason.ABORT)
        return replace(generation, routed_experts=torch.cat([routes, generation.routed_experts]))
