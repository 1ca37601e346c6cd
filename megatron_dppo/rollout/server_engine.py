"""The rollout engine whose responses come from inference servers."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_dppo.errors import ServerError
from megatron_dppo.hf import end_tokens, routing_shape
from megatron_dppo.rollout.contract import Contract
from megatron_dppo.rollout.loop_thread import LoopThread
from megatron_dppo.rollout.pool import PoolCounts, ServerPool
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.server import InferenceServer
from megatron_dppo.rollout.turns import GenerateFunction, Turns, call_generate
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams

T = TypeVar("T")
_EMPTY_ANSWERS = 8
"""Times in a row that a request may be stopped from outside without a token, about 10 seconds in all."""
_STOP_SECONDS = 30.0
"""Limit of stopping requests; the tokens of one that still runs are given up."""
_STOP_AGAIN = 0.2


@dataclass(eq=False)
class _Sample:
    """One response on its way."""

    prompt: Prompt
    response: GrowingResponse
    params: SamplingParams
    index: int
    """among the responses of one call: siblings get different seeds by it"""
    request_id: str = ""
    parts: int = 0
    stopping: bool = False
    reason: FinishReason | None = None
    """None = not complete"""


class ServerEngine:
    """A ``RolloutEngine`` over a ``ServerPool``. Any thread may call it; servers belong to the thread in here.

    The seed of a request is a function of ``SamplingParams.seed``, of the place of its prompt in the call, and of how
    often the response was continued. Servers sample by it only where they are started so (SGLang:
    ``--enable-deterministic-inference``), and then by what else runs at the time, so rollouts do not repeat to the bit.

    Args:
        servers: clients that were not used in another event loop; ``close`` closes them.
        tokenizer: decodes responses, names the end-of-sequence token.
        hf_config: the model's transformers config.
        max_in_flight: see ``ServerPool``, as for the next three.
        function: a user's ``rollout.generate``; None = one response to each prompt.
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
    ) -> None:
        self._servers, self._tokenizer, self._function = list(servers), tokenizer, function
        self._end = tuple(sorted(end_tokens(hf_config, tokenizer)))
        self._routing = routing_shape(hf_config)
        self._pool = ServerPool(
            servers,
            Contract(vocab_size=hf_config.vocab_size, end_tokens=self._end),
            max_in_flight=max_in_flight,
            health_seconds=health_seconds,
            patience_seconds=patience_seconds,
            first=first,
        )
        self._name, self._numbers = uuid.uuid4().hex[:12], itertools.count()
        self._unfinished: dict[int, list[_Sample]] = {}
        self._thread = LoopThread("rollout")

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next ``generate`` uses; -1 before the first ``use_version``."""
        return self._pool.version

    def take_counts(self) -> PoolCounts:
        """Retries and lost servers since the last call."""
        counts, self._pool.counts = self._pool.counts, PoolCounts()
        return counts

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop that the servers belong to, such as a weight sync."""
        return self._thread.run(coroutine)

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """See ``ServerPool.use_version``."""

        async def use() -> None:
            self._pool.use_version(version, urls)

        self.run(use())

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """One completion a prompt, in order.

        A response that is stopped from outside, as by an update of the weights, is continued, also under new weights;
        its ``policy_versions`` say which token is whose.

        Raises:
            ServerError: see ``ServerPool.generate``.
            GenerateError: the user's function failed.
            ValueError: routed experts are asked of a dense model.
        """
        samples = self._samples(prompts, params)
        return self.run(_all([self._complete(sample) for sample in samples]))

    def generate_first(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[int],
        siblings: int,
        params: SamplingParams,
        enough: int,
        keep: Collection[int],
    ) -> list[list[Completion] | None]:
        """See ``StoppingEngine.generate_first``.

        Raises:
            ServerError: see ``ServerPool.generate``.
            ValueError: routed experts are asked of a dense model.
        """
        fresh = iter(self._samples([p for p in prompts for _ in range(siblings)], params))
        groups = [[next(fresh) for _ in range(siblings)] for _ in prompts]

        async def run() -> list[list[Completion] | None]:
            for i, key in enumerate(keys):
                groups[i] = _continued(self._unfinished.pop(key, groups[i]), groups[i])
            await self._until(groups, enough)
            stopped = {k: g for k, g in zip(keys, groups, strict=True) if any(s.reason is None for s in g)}
            self._unfinished = {k: g for k, g in (self._unfinished | stopped).items() if k in keep}
            return [self._group(group) for group in groups]

        return self.run(run())

    def close(self) -> None:
        """Stop what runs, close the connections and the thread."""

        async def close() -> None:
            await asyncio.gather(*(server.close() for server in self._servers))

        self.run(close())
        self._thread.close()

    def _samples(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[_Sample]:
        if params.routed_experts and self._routing is None:
            raise ValueError("SamplingParams.routed_experts = True, but the model of the servers has no experts")
        routing = self._routing if params.routed_experts else None
        return [
            _Sample(prompt, GrowingResponse(prompt.token_ids, topk=params.topk_logprobs, routing=routing), params, i)
            for i, prompt in enumerate(prompts)
        ]

    async def _complete(self, sample: _Sample) -> Completion:
        if self._function is None:
            sample.reason = await self._sample(sample, sample.params.max_new_tokens, ())
            return self._completion(sample)

        async def more(limit: int, stop: tuple[int, ...]) -> FinishReason:
            reason = await self._sample(sample, len(sample.response.tokens) + limit, stop)
            assert reason is not None  # None needs ``stopping``, which nobody sets here
            return reason

        turns = Turns(sample.prompt, sample.response, sample.params, self._tokenizer, more)
        return await call_generate(self._function, turns)

    async def _sample(self, sample: _Sample, length: int, stop: tuple[int, ...]) -> FinishReason | None:
        """Sample until the response is complete or has ``length`` tokens; None when it is to stop before."""
        empty = 0
        while (left := length - len(sample.response.tokens)) > 0:
            if sample.stopping:
                return None
            sample.request_id = f"{self._name}-{sample.params.seed}-{next(self._numbers)}"
            params = _seeded(sample)
            request = sample.response.request(sample.request_id, params, (*self._end, *stop), left)
            generation = await self._pool.generate(request, f"{sample.prompt.prompt_id}/{sample.params.seed}")
            sample.response.append_sampled(generation)
            sample.parts += 1
            if generation.finish_reason != FinishReason.ABORT:
                return generation.finish_reason
            # An engine that is told to stop while it samples the end token says abort of what is complete.
            if generation.token_ids and generation.token_ids[-1] in (*self._end, *stop):
                return FinishReason.STOP
            empty = 0 if generation.token_ids else empty + 1
            if empty > _EMPTY_ANSWERS:
                raise ServerError(
                    "rollout.servers",
                    f"a request was stopped from outside {empty} times without a new token; does another program send "
                    "aborts to the servers, or are they paused?",
                )
            if empty:
                await asyncio.sleep(0.02 * 2**empty)
        return FinishReason.LENGTH

    def _completion(self, sample: _Sample) -> Completion:
        assert sample.reason is not None
        return sample.response.completion(sample.reason, self._tokenizer)

    def _group(self, group: Sequence[_Sample]) -> list[Completion] | None:
        if any(sample.reason is None for sample in group):
            return None
        return [self._completion(sample) for sample in group]

    async def _until(self, groups: Sequence[Sequence[_Sample]], enough: int) -> None:
        """Run until ``enough`` groups are complete, and stop the others."""

        async def work(sample: _Sample) -> None:
            if sample.reason is None:
                sample.reason = await self._sample(sample, sample.params.max_new_tokens, ())

        running = {sample: asyncio.create_task(work(sample)) for group in groups for sample in group}
        waiting = {asyncio.gather(*(running[sample] for sample in group)) for group in groups}
        try:
            complete = 0
            while complete < min(enough, len(groups)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for whole in done:
                    whole.result()
                complete += len(done)
            await self._stop(running)
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), *waiting, return_exceptions=True)
        for task in running.values():
            if not task.cancelled():
                task.result()

    async def _stop(self, running: dict[_Sample, asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _STOP_SECONDS
        for sample, task in running.items():
            sample.stopping = True
            if not self._pool.was_sent(sample.request_id):
                task.cancel()  # else it would be sent now that others make room
        while (left := {s: t for s, t in running.items() if not t.done()}) and loop.time() < end:
            await self._pool.abort(sample.request_id for sample in left)
            await asyncio.wait(left.values(), timeout=_STOP_AGAIN)


def _continued(kept: list[_Sample], fresh: list[_Sample]) -> list[_Sample]:
    """Kept samples, ready to go on as the fresh ones would begin."""
    for old, new in zip(kept, fresh, strict=True):
        old.params, old.index, old.stopping = new.params, new.index, False
    return kept


def _seeded(sample: _Sample) -> SamplingParams:
    """Parameters with the seed of one request: no two requests of a run share it, but by accident."""
    params = sample.params
    key = f"{params.seed}/{sample.index}/{sample.parts}"
    return replace(params, seed=random.Random(key).getrandbits(31))


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
