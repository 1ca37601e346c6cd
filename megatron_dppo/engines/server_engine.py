"""The rollout engine whose responses come from inference servers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_dppo.engines.answers import AnswerProcesses
from megatron_dppo.engines.servers.contract import Contract, checked
from megatron_dppo.engines.servers.pool import PoolCounts, ServerPool
from megatron_dppo.engines.servers.responder import (
    InFlightResponse,
    LoopThread,
    PromptRoutes,
    Responder,
)
from megatron_dppo.hf.folder import end_tokens, routing_shape
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.server import InferenceServer
from megatron_dppo.rollout.turns import GenerateFunction
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo.types.token_columns import asked_columns

WORTH_ASKING_ONCE = 512
"""Tokens of a prompt: the routes of a shorter one, in each answer, cost less than one request more."""

T = TypeVar("T")
_STOP_SECONDS = 30.0
"""Limit of stopping requests; the tokens of one that still runs are given up."""
_STOP_AGAIN = 0.2


def contract_of(hf_config: Any, tokenizer: Any) -> Contract:
    """What answers of servers of a model have to keep."""
    return Contract(vocab_size=hf_config.vocab_size, end_tokens=tuple(sorted(end_tokens(hf_config, tokenizer))))


class ServerEngine:
    """A ``RolloutEngine`` over a ``ServerPool``. Any thread may call it; servers belong to the thread in here.

    The seed of a request is a function of ``SamplingParams.seed``, of the place of its prompt in the call, and of how
    often the response was continued. Servers sample by it only where they are started so (SGLang:
    ``--enable-deterministic-inference``), and then by what else runs at the time, so rollouts do not repeat to the bit.

    A response that is stopped goes on, also under new weights; its ``policy_versions`` say which token is whose.

    Args:
        servers: clients that were not used in another event loop; ``close`` closes them.
        tokenizer: decodes responses, names the end-of-sequence token.
        hf_config: the model's transformers config.
        max_in_flight: see ``ServerPool``, as for the next three.
        function: a user's ``rollout.generate``; None = one response to each prompt.
        answers: asks the servers in place of this process; ``close`` closes it.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        tokenizer: Any,
        hf_config: Any,
        *,
        max_in_flight: int,
        health_seconds: float,
        patience_seconds: float = 60.0,
        first: int = 0,
        function: GenerateFunction | None = None,
        answers: AnswerProcesses | None = None,
    ) -> None:
        self._servers, self._answers = list(servers), answers
        contract = contract_of(hf_config, tokenizer)
        self._end = contract.end_tokens
        self._routing = routing_shape(hf_config)
        self._pool = ServerPool(
            servers,
            checked(contract) if answers is None else answers.ask,
            max_in_flight=max_in_flight,
            health_seconds=health_seconds,
            patience_seconds=patience_seconds,
            first=first,
        )
        self._responder = Responder(self._pool, tokenizer, self._end, function)
        self._held: dict[int, GroupState] = {}
        self._under_way: dict[int, list[InFlightResponse]] = {}
        self._paused = False
        self._thread = LoopThread("rollout")

    @property
    def policy_version(self) -> int:
        """Version of the weights that a request gets now; -1 before the first ``use_version``."""
        return self._pool.version

    def take_counts(self) -> PoolCounts:
        """Retries and lost servers since the last call."""
        counts, self._pool.counts = self._pool.counts, PoolCounts()
        return counts

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop that the servers belong to, such as a weight sync."""
        return self._thread.run(coroutine)

    def pause(self) -> None:
        """See ``ServerPool.pause``; ``use_version`` ends it. Again, it does nothing."""
        if not self._paused:
            self.run(self._pool.pause())
        self._paused = True

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """See ``ServerPool.use_version``."""

        async def use() -> None:
            self._pool.use_version(version, urls)
            if self._paused:
                self._pool.proceed()

        self.run(use())
        self._paused = False

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """One completion a prompt, in order.

        Raises:
            ServerError: see ``ServerPool.generate``.
            GenerateError: the user's function failed.
            ValueError: routed experts are asked of a dense model.
        """
        samples = [self._sample(prompt, params, i) for i, prompt in enumerate(prompts)]

        async def run() -> None:
            await _all([self._responder.complete(sample) for sample in samples])

        self.run(run())
        return [sample.completion for sample in samples if sample.completion is not None]

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """See ``RolloutEngine.submit``; returns at once.

        Raises:
            ValueError: routed experts are asked of a dense model.
        """
        futures: list[SampledFuture] = [Future() for _ in groups]
        fresh, sizes = 0, []
        for group in groups:
            routes = self._prompt_routes(group, params)
            sizes.append([self._sample(group.prompt, params, fresh + i, routes) for i in range(group.siblings)])
            fresh += group.siblings

        async def run() -> None:
            for group, samples in zip(groups, sizes, strict=True):
                for sample, state in zip(samples, self._held.pop(group.key, ()), strict=False):
                    _take(sample, state)
                self._under_way[group.key] = samples
            error: BaseException | None = None
            try:
                await self._until(sizes, futures, enough)
            except BaseException as failure:
                error = failure
            for group, samples, future in zip(groups, sizes, futures, strict=True):
                del self._under_way[group.key]
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                    continue
                if group.key in keep:
                    self._held[group.key] = tuple(sample.state for sample in samples)
                future.set_result(None)

        self._thread.start(run())
        return futures

    def unfinished(self) -> dict[int, GroupState]:
        """See ``RolloutEngine.unfinished``: requests that servers have are stopped, and sent again for what is left."""
        return self.run(self._snapshot())

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """See ``RolloutEngine.restore``."""
        self._held |= groups

    def close(self) -> None:
        """Stop what runs, close the connections and the thread."""

        async def close() -> None:
            await asyncio.gather(*(server.close() for server in self._servers))
            if self._answers is not None:
                await self._answers.close()

        self._thread.cancel()
        self.run(close())
        self._thread.close()

    def _prompt_routes(self, group: GroupRequest, params: SamplingParams) -> PromptRoutes | None:
        is_long = len(group.prompt.start) >= WORTH_ASKING_ONCE
        if not params.routed_experts or self._routing is None or group.siblings == 1 or not is_long:
            return None
        return PromptRoutes(self._pool, group.prompt, params, self._routing, self._end)

    def _sample(
        self, prompt: Prompt, params: SamplingParams, index: int, routes: PromptRoutes | None = None
    ) -> InFlightResponse:
        if params.routed_experts and self._routing is None:
            raise ValueError("SamplingParams.routed_experts = True, but the model of the servers has no experts")
        if params.router_weights:
            raise ValueError("SamplingParams.router_weights = True, but servers return no combine weights of routers")
        routing = self._routing if params.routed_experts else None
        response = GrowingResponse(prompt.start, routing=routing, columns=asked_columns(params))
        return InFlightResponse(prompt, response, params, index, routes)

    async def _until(
        self, groups: Sequence[Sequence[InFlightResponse]], futures: Sequence[SampledFuture], enough: int
    ) -> None:
        """Run until ``enough`` groups are complete, and stop the others; a future is set when its group is complete."""
        running = {s: asyncio.create_task(self._responder.complete(s)) for group in groups for s in group}
        waiting = {asyncio.gather(*(running[s] for s in groups[i])): i for i in range(len(groups))}
        pending = set(waiting)
        try:
            complete = 0
            while complete < min(enough, len(groups)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for whole in done:
                    whole.result()
                    _settle(groups[waiting[whole]], futures[waiting[whole]])
                complete += len(done)
            await self._stop(running)
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), *waiting, return_exceptions=True)
        for task in running.values():
            if not task.cancelled():
                task.result()
        for group, future in zip(groups, futures, strict=True):
            _settle(group, future)

    async def _stop(self, running: Mapping[InFlightResponse, asyncio.Task[None]]) -> None:
        for sample, task in running.items():
            sample.stopping = True
            if not self._pool.was_sent(sample.request_id):
                task.cancel()  # else it would be sent now that others make room
        loop = asyncio.get_running_loop()
        end = loop.time() + _STOP_SECONDS
        while (left := {s: t for s, t in running.items() if not t.done()}) and loop.time() < end:
            await self._pool.abort(sample.request_id for sample in left)
            await asyncio.wait(left.values(), timeout=_STOP_AGAIN)

    async def _snapshot(self) -> dict[int, GroupState]:
        await self._pool.pause()
        try:
            under_way = {key: tuple(s.state for s in samples) for key, samples in self._under_way.items()}
            return self._held | under_way
        finally:
            self._pool.proceed()


def _take(sample: InFlightResponse, state: Completion | PartialResponse) -> None:
    if isinstance(state, Completion):
        sample.completion = state
    else:
        sample.response.restore(state)


def _settle(group: Sequence[InFlightResponse], future: SampledFuture) -> None:
    completions = [sample.completion for sample in group if sample.completion is not None]
    if len(completions) == len(group) and not future.done():
        future.set_result(completions)


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails, the others are cancelled and have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
