"""Many runs of a user function in lockstep: their turns are decoded together, round by round."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.turns import GenerateFunction, run_user_function
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo_engines.server import GenerateRequest, Generation

DecodeFunction = Callable[[Sequence[GenerateRequest]], Sequence[Generation]]
"""Function that returns the generations of all requests, in order."""
PATIENCE_SECONDS = 60.0
"""Time without any progress after which the pending turns are decoded without the missing ones. These may be waiting
for a pending one: for example a function may hold one of few tool slots during all its turns."""


@dataclass(eq=False)
class PendingResponse:
    """A response that is being sampled."""

    prompt: Prompt
    response: GrowingResponse
    completion: Completion | None = None
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to the model's own, without a user function."""


class CompletionTarget:
    """A number of complete groups after which the other groups are stopped."""

    def __init__(self, groups: Sequence[Sequence[PendingResponse]], num_groups: int) -> None:
        self._num_incomplete = [sum(sample.completion is None for sample in group) for group in groups]
        self._group_indices = {sample: i for i, group in enumerate(groups) for sample in group}
        self._num_groups = num_groups

    @property
    def is_reached(self) -> bool:
        """True if the other groups are to be stopped."""
        return self._num_incomplete.count(0) >= self._num_groups

    def mark_complete(self, samples: Iterable[PendingResponse]) -> bool:
        """Count responses that have just become complete, and return ``is_reached``."""
        for sample in samples:
            self._num_incomplete[self._group_indices[sample]] -= 1
        return self.is_reached


@dataclass(frozen=True)
class _PendingTurn:
    request: GenerateRequest
    generation: asyncio.Future[Generation | None]
    """None cancels the response."""


@dataclass
class LockstepRunner:
    """One run of a user function for each response. Used once.

    A round begins when every run that has not ended has a pending turn. So the same function gives the same rounds,
    whatever else it waits for and for how long.
    """

    function: GenerateFunction
    params: SamplingParams
    tokenizer: Tokenizer
    decode: DecodeFunction
    target: CompletionTarget | None
    _pending: dict[tuple[int, int], _PendingTurn] = field(default_factory=dict, init=False)
    """Pending turns by the indices of the response and of its sequence."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_stopping: bool = field(default=False, init=False)

    async def run(self, samples: Sequence[PendingResponse]) -> None:
        """Complete the samples, or extend them until the target is reached."""
        tasks = [asyncio.create_task(self._complete(i, sample)) for i, sample in enumerate(samples)]
        for task in tasks:
            # The end of a run may be what a round waits for.
            task.add_done_callback(lambda _: self._changed.set())
        try:
            while await self._wait_for_round(tasks):
                # Between rounds only, so that tokens that were decoded are never lost.
                self._is_stopping = self._is_stopping or (self.target is not None and self.target.is_reached)
                self._run_round()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, index: int, sample: PendingResponse) -> None:
        async def sample_turn(
            response: GrowingResponse, limit: int, stop_token_ids: tuple[int, ...]
        ) -> FinishReason | None:
            return await self._sample_turn(index, response, limit, stop_token_ids)

        params = sample.prompt.limited(self.params)
        sample.completion = await run_user_function(
            self.function, sample.prompt, sample.response, params, self.tokenizer, sample_turn
        )
        if sample.completion is not None and self.target is not None:
            self.target.mark_complete([sample])

    async def _sample_turn(
        self, index: int, response: GrowingResponse, limit: int, stop_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        """Wait for the round that decodes this turn; return None if the response is canceled."""
        if limit <= 0:
            return FinishReason.LENGTH
        key = (index, response.number)
        if key in self._pending:
            raise RuntimeError("turns.sample was called while another turn of the same response was being sampled")
        request = response.next_request(str(index), self.params, stop_token_ids, limit)
        future: asyncio.Future[Generation | None] = asyncio.get_running_loop().create_future()
        self._pending[key] = _PendingTurn(request, future)
        self._changed.set()
        try:
            generation = await future
        finally:
            self._pending.pop(key, None)  # it is still there if the function canceled the call
        if generation is None:
            return None
        response.append_sampled(generation)
        return generation.finish_reason

    async def _wait_for_round(self, tasks: Sequence[asyncio.Task[None]]) -> bool:
        """Wait until every run has ended or has a pending turn; return False if all have ended."""
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # raises its error
            unfinished = {i for i, task in enumerate(tasks) if not task.done()}
            if unfinished <= {i for i, _ in self._pending}:
                return bool(unfinished)
            self._changed.clear()
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                if self._pending:
                    return True

    def _run_round(self) -> None:
        """Decode the pending turns in the order of their responses, so that the order of the calls has no effect."""
        # A turn that the function canceled is left out.
        turns = [turn for _, turn in sorted(self._pending.items()) if not turn.generation.done()]
        self._pending.clear()
        requests = [turn.request for turn in turns]
        generations = [None] * len(turns) if self._is_stopping else self.decode(requests)
        for turn, generation in zip(turns, generations, strict=True):
            turn.generation.set_result(generation)
