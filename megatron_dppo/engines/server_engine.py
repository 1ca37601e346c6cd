"""The rollout engine whose responses come from inference servers."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from megatron_dppo.engines.client_processes import ClientProcesses
from megatron_dppo.engines.responder import InFlightResponse, LoopThread, PromptRoutes, Responder
from megatron_dppo.hf.folder import end_tokens, routing_shape
from megatron_dppo.rollout.engine import GroupRequest, GroupState, SampledFuture
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.turns import GenerateFunction
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo.types.model_folder import HfConfig, Tokenizer
from megatron_dppo.types.token_columns import requested_columns
from megatron_dppo_engines.sampling_sums import RankSums
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.servers.contract import Contract, checked
from megatron_dppo_engines.servers.pool import MAX_IMBALANCE, PoolCounts, ServerPool

MIN_SHARED_PROMPT_TOKENS = 512
"""Prompt tokens from which siblings share the routes of their prompt. The routes of a shorter prompt in each response
cost less than one more request."""
_STOP_SECONDS = 30.0
"""Limit for stopping requests; the tokens of a request that still runs then are lost."""
_ABORT_INTERVAL = 0.2
"""Seconds between two aborts of requests that have not returned."""

T = TypeVar("T")


def build_contract(hf_config: HfConfig, tokenizer: Tokenizer) -> Contract:
    """Return the contract for responses of servers with this model."""
    return Contract(
        vocab_size=hf_config.vocab_size,
        end_tokens=tuple(sorted(end_tokens(hf_config, tokenizer))),
        special_tokens=tuple(sorted(getattr(tokenizer, "all_special_ids", ()))),
    )


class ServerEngine:
    """A ``RolloutEngine`` over a ``ServerPool``. Any thread may call it; the servers belong to its own thread.

    The seed of a request is a function of ``SamplingParams.seed``, the index of its prompt in the call, and the number
    of times the response was continued. Servers use it only with an option (SGLang:
    ``--enable-deterministic-inference``). What else runs on the server still has an effect, so rollouts are not
    reproducible to the bit.

    A response that is stopped continues later, also under new weights. Its ``policy_versions`` record which weights
    sampled which token. ``close`` closes the servers, which no other event loop has used, and the client processes.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        tokenizer: Tokenizer,
        hf_config: HfConfig,
        *,
        max_in_flight: int,
        health_seconds: float,
        unavailable_timeout_seconds: float = 60.0,
        first: int = 0,
        siblings_per_server: int | None = None,
        function: GenerateFunction | None = None,
        client_processes: ClientProcesses | None = None,
    ) -> None:
        self._servers = list(servers)
        self._client_processes = client_processes
        contract = build_contract(hf_config, tokenizer)
        self._end_tokens = contract.end_tokens
        self._routing = routing_shape(hf_config)
        self.pool = ServerPool(
            servers,
            checked(contract) if client_processes is None else client_processes.generate,
            max_in_flight=max_in_flight,
            health_seconds=health_seconds,
            unavailable_timeout_seconds=unavailable_timeout_seconds,
            first=first,
            max_imbalance=max(MAX_IMBALANCE, siblings_per_server or 0),
        )
        self._responder = Responder(self.pool, tokenizer, self._end_tokens, function, siblings_per_server)
        self._held: dict[int, GroupState] = {}
        """Responses of incomplete groups that are not in flight, by key."""
        self._in_flight: dict[int, list[InFlightResponse]] = {}
        """Responses of the groups in flight, by key."""
        self._is_paused = False
        self._thread = LoopThread("rollout")

    @property
    def policy_version(self) -> int:
        """Version of the weights for new requests; -1 before the first ``use_version``."""
        return self.pool.version

    def take_counts(self) -> PoolCounts:
        """Return the pool's counts since the last call, and reset them."""
        counts = self.pool.counts
        self.pool.counts = PoolCounts()
        return counts

    def take_ranks(self) -> dict[str, RankSums]:
        """Return the ranks of the tokens since the last call by URL, and reset them."""

        # In the thread of the servers, where responses add to it.
        async def take() -> dict[str, RankSums]:
            ranks = self.pool.ranks
            self.pool.ranks = {}
            return ranks

        return self.run(take())

    def exclude(self, servers: Mapping[str, str]) -> None:
        """See ``ServerPool.exclude``. ``servers`` has the reason by URL."""

        async def exclude() -> None:
            for url, problem in servers.items():
                self.pool.exclude(url, problem)

        self.run(exclude())

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine, such as a weight sync, in the event loop that the servers belong to."""
        return self._thread.run(coroutine)

    def pause(self) -> None:
        """See ``ServerPool.pause``; ``use_version`` ends the pause. A second call does nothing."""
        if not self._is_paused:
            self.run(self.pool.pause())
        self._is_paused = True

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """See ``ServerPool.use_version``."""

        async def use() -> None:
            self.pool.use_version(version, urls)
            if self._is_paused:
                self.pool.resume()

        self.run(use())
        self._is_paused = False

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Return one completion per prompt, in order."""
        samples = [self._sample(prompt, params, i) for i, prompt in enumerate(prompts)]

        async def run() -> None:
            await _gather_or_cancel([self._responder.complete(sample) for sample in samples])

        self.run(run())
        return [sample.completion for sample in samples if sample.completion is not None]

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        """See ``RolloutEngine.submit``; returns at once."""
        futures: list[SampledFuture] = [Future() for _ in groups]
        samples_by_group = []
        # Counted over all groups of the call, because the seed of a response follows from its index.
        first_index = 0
        for group in groups:
            routes = self._prompt_routes(group, params)
            samples_by_group.append(
                [self._sample(group.prompt, params, first_index + i, routes) for i in range(group.siblings)]
            )
            first_index += group.siblings

        async def run() -> None:
            for group, samples in zip(groups, samples_by_group, strict=True):
                for sample, state in zip(samples, self._held.pop(group.key, ()), strict=False):
                    _restore(sample, state)
                self._in_flight[group.key] = samples
            error: BaseException | None = None
            try:
                await self._run_until(samples_by_group, futures, enough)
            except BaseException as failure:
                error = failure
            # Every future gets a result, also after an error: the caller waits for it.
            for group, samples, future in zip(groups, samples_by_group, futures, strict=True):
                del self._in_flight[group.key]
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
        """See ``RolloutEngine.unfinished``: requests on servers are aborted, and continue afterwards."""
        return self.run(self._snapshot())

    def restore(self, groups: Mapping[int, GroupState]) -> None:
        """See ``RolloutEngine.restore``."""
        self._held |= groups

    def close(self) -> None:
        """Cancel everything that runs, and close the connections and the thread."""

        async def close() -> None:
            await asyncio.gather(*(server.close() for server in self._servers))
            if self._client_processes is not None:
                await self._client_processes.close()

        # Requests first, because they use the connections.
        self._thread.cancel()
        self.run(close())
        self._thread.close()

    def _prompt_routes(self, group: GroupRequest, params: SamplingParams) -> PromptRoutes | None:
        is_long = len(group.prompt.context_ids) >= MIN_SHARED_PROMPT_TOKENS
        if not params.routed_experts or self._routing is None or group.siblings == 1 or not is_long:
            return None
        return PromptRoutes(self.pool, group.prompt, params, self._routing, self._end_tokens)

    def _sample(
        self, prompt: Prompt, params: SamplingParams, index: int, routes: PromptRoutes | None = None
    ) -> InFlightResponse:
        if params.routed_experts and self._routing is None:
            raise ValueError("SamplingParams.routed_experts = True, but the model of the servers has no experts")
        if params.router_weights:
            raise ValueError("SamplingParams.router_weights = True, but servers return no combine weights of routers")
        routing = self._routing if params.routed_experts else None
        response = GrowingResponse(prompt.context_ids, routing=routing, columns=requested_columns(params))
        return InFlightResponse(prompt, response, prompt.limited(params), index, routes)

    async def _run_until(
        self, groups: Sequence[Sequence[InFlightResponse]], futures: Sequence[SampledFuture], enough: int
    ) -> None:
        """Run until ``enough`` groups are complete, then stop the others; set the future of each complete group."""
        running = {s: asyncio.create_task(self._responder.complete(s)) for group in groups for s in group}
        group_indices = {asyncio.gather(*(running[s] for s in group)): i for i, group in enumerate(groups)}
        pending = set(group_indices)
        try:
            num_complete = 0
            while num_complete < min(enough, len(groups)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for gathered in done:
                    gathered.result()
                    index = group_indices[gathered]
                    _set_if_complete(groups[index], futures[index])
                num_complete += len(done)
            await self._stop(running)
        finally:
            for task in running.values():
                task.cancel()
            # Also the gathered futures: asyncio reports exceptions that are never retrieved.
            await asyncio.gather(*running.values(), *group_indices, return_exceptions=True)
        # A response may have failed while it was being stopped.
        for task in running.values():
            if not task.cancelled():
                task.result()  # raises its error
        # A group may have become complete while the others were stopped.
        for group, future in zip(groups, futures, strict=True):
            _set_if_complete(group, future)

    async def _stop(self, running: Mapping[InFlightResponse, asyncio.Task[None]]) -> None:
        for sample, task in running.items():
            sample.is_stopping = True
            if not any(map(self.pool.is_sent, sample.request_ids)):
                task.cancel()  # else the pool would send it now that others make room
        loop = asyncio.get_running_loop()
        end = loop.time() + _STOP_SECONDS
        while (unfinished := {s: t for s, t in running.items() if not t.done()}) and loop.time() < end:
            await self.pool.abort(request_id for sample in unfinished for request_id in sample.request_ids)
            await asyncio.wait(unfinished.values(), timeout=_ABORT_INTERVAL)

    async def _snapshot(self) -> dict[int, GroupState]:
        await self.pool.pause()
        try:
            in_flight = {key: tuple(s.state for s in samples) for key, samples in self._in_flight.items()}
            return self._held | in_flight
        finally:
            self.pool.resume()


def _restore(sample: InFlightResponse, state: Completion | PartialResponse) -> None:
    if isinstance(state, Completion):
        sample.completion = state
    else:
        sample.response.restore(state)


def _set_if_complete(group: Sequence[InFlightResponse], future: SampledFuture) -> None:
    completions = [sample.completion for sample in group if sample.completion is not None]
    if len(completions) == len(group) and not future.done():
        future.set_result(completions)


async def _gather_or_cancel(coroutines: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Return all results in order; if one fails, cancel the others and wait for their end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
