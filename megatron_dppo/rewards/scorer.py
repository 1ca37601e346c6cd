"""Scores batches of completions; a failing or hanging reward costs that sample only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec, load
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rewards.math import quick_math_reward
from megatron_dppo.rewards.scoring import Outcome
from megatron_dppo.rewards.shaping import Shaping
from megatron_dppo.rewards.words import words_reward
from megatron_dppo.rewards.worker import Worker


class RewardScorer:
    """Scores items in worker processes; answers that need no parser are scored here.

    Samples of an async function run at the same time, ``async_concurrency`` in a worker. A function for batches gets
    an equal share of the samples in each worker, so all of them with one worker. A batch that raises, hangs or returns
    something else than one value a sample is split in two and each half is tried again, until the samples at fault
    stand alone.

    Args:
        function: the function, or just its name.
        timeout_seconds: limit for one sample, or one call of a function for batches; the worker is killed then.
        num_workers: processes.
        async_concurrency: samples of an async function that one worker has under way.
        shaping: what is added to the score.

    Raises:
        RewardError: the function cannot be loaded, or its signature is not known.
    """

    def __init__(
        self,
        function: FunctionSpec | str,
        timeout_seconds: float,
        num_workers: int,
        *,
        async_concurrency: int = 64,
        shaping: Shaping | None = None,
    ) -> None:
        self._spec = FunctionSpec(function) if isinstance(function, str) else function
        loaded = load(self._spec)
        self._batched = loaded.form.batched
        self._largest = async_concurrency if loaded.is_async else 1
        self._shaping = shaping or Shaping()
        concurrent = loaded.is_async and not self._batched
        self._workers = [Worker(self._spec, timeout_seconds, concurrent=concurrent) for _ in range(num_workers)]

    def score(self, items: Sequence[RewardItem], *, is_batch: bool = True) -> list[RewardResult]:
        """One result an item, in order.

        Args:
            items: what is scored.
            is_batch: they are enough to judge the function by.

        Raises:
            RewardError: every one of several items of a batch failed, so the function itself is broken.
        """
        outcomes = {place: outcome for place, item in enumerate(items) if (outcome := self._quick(item)) is not None}
        waiting = [place for place in range(len(items)) if place not in outcomes]
        outcomes |= self._in_workers(waiting, items)
        final = [self._result(item, outcomes[place]) for place, item in enumerate(items)]
        if is_batch and len(final) > 1 and all(result.failed for result in final):
            raise RewardError(
                f"reward.function = {self._spec.name!r} failed on all {len(final)} samples; first error: "
                f"{final[0].error}"
            )
        return final

    def _quick(self, item: RewardItem) -> Outcome | None:
        if self._spec.name == "words" and item.label.split():
            return Outcome(words_reward(prompt="", completion=item.completion, label=item.label, metadata={}))
        if self._spec.name != "math":
            return None
        verdict = quick_math_reward(item.completion, item.label, item.metadata)
        return None if verdict is None else Outcome(verdict)

    def _chunks(self, places: list[int]) -> Iterator[list[int]]:
        share = -(-len(places) // len(self._workers))
        size = share if self._batched else max(1, min(self._largest, share))
        return (places[start : start + size] for start in range(0, len(places), max(1, size)))

    def _in_workers(self, places: list[int], items: Sequence[RewardItem]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        queue = deque(self._chunks(places))
        idle, busy = list(self._workers), list[Worker]()
        for worker in idle[: len(queue)]:
            worker.launch()
        while queue or busy:
            while queue and idle:
                busy.append(worker := idle.pop(0))
                worker.submit(queue.popleft(), items)
            wait([worker.connection for worker in busy], max(0.0, min(w.deadline for w in busy) - time.monotonic()))
            for worker in list(busy):
                chunk = worker.receive()
                if chunk is None:
                    continue
                busy.remove(worker)
                idle.append(worker)
                outcomes |= chunk.outcomes
                left = chunk.unscored
                if len(left) == 1:
                    outcomes[left[0]] = Outcome(0.0, {}, chunk.error)
                elif left:
                    queue.extendleft([left[len(left) // 2 :], left[: len(left) // 2]])
        return outcomes

    def _result(self, item: RewardItem, outcome: Outcome) -> RewardResult:
        if outcome.error:
            return RewardResult(reward=0.0, failed=True, error=outcome.error)
        extra = self._shaping.parts(item)
        if both := sorted(extra.keys() & outcome.parts.keys()):
            problem = f"the function returned a part named {both[0]!r}, which is that of reward.{both[0]}*; rename it"
            return RewardResult(reward=0.0, failed=True, error=problem)
        parts = {**outcome.parts, **extra}
        reward = outcome.score + sum(extra.values())
        return RewardResult(reward=reward, parts={"score": outcome.score, **parts} if parts else {})

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.close()
