"""The processes of one reward function, and the loop that several functions' processes share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from megatron_dppo.rewards.functions import FunctionSpec, load
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.math import quick_math_reward
from megatron_dppo.rewards.scoring import ScoringOutcome
from megatron_dppo.rewards.task_rewards import words_reward
from megatron_dppo.rewards.worker import Worker


class FunctionPool:
    """One function and its processes; those of samples that need no process are scored here.

    Args:
        spec: the function.
        timeout_seconds: limit for one sample, or one call of a function for batches; the worker is killed then.
        num_workers: processes.
        async_concurrency: samples of an async function that one worker has under way.

    Raises:
        RewardError: the function cannot be loaded, its signature is not known, or its options do not fit.
    """

    def __init__(
        self, spec: FunctionSpec, timeout_seconds: float, num_workers: int, *, async_concurrency: int = 64
    ) -> None:
        self.spec = spec
        loaded = load(spec)
        self._batched = loaded.form.batched
        self._largest = async_concurrency if loaded.is_async else 1
        concurrent = loaded.is_async and not self._batched
        self._workers = [Worker(spec, timeout_seconds, concurrent=concurrent) for _ in range(num_workers)]
        self._items: Sequence[RewardItem] = ()
        self._queue, self._idle, self.busy = deque[list[int]](), list[Worker](), list[Worker]()
        self.outcomes: dict[int, ScoringOutcome] = {}
        """by place, of the samples that ``begin`` got"""

    def begin(self, items: Sequence[RewardItem]) -> None:
        """Take samples, and start as many processes as they need."""
        self._items = items
        quick = ((place, self._quick(item)) for place, item in enumerate(items))
        self.outcomes = {place: outcome for place, outcome in quick if outcome is not None}
        self._queue = deque(self._chunks([place for place in range(len(items)) if place not in self.outcomes]))
        self._idle, self.busy = list(self._workers), []
        for worker in self._idle[: len(self._queue)]:
            worker.launch()

    def feed(self) -> None:
        """Give what waits to processes that have nothing to do."""
        while self._queue and self._idle:
            self.busy.append(worker := self._idle.pop(0))
            worker.submit(self._queue.popleft(), self._items)

    def collect(self) -> None:
        """Take what the processes have answered; end those that are over their limit."""
        for worker in list(self.busy):
            chunk = worker.receive()
            if chunk is None:
                continue
            self.busy.remove(worker)
            self._idle.append(worker)
            self.outcomes |= chunk.outcomes
            left = chunk.unscored
            if len(left) == 1:
                self.outcomes[left[0]] = ScoringOutcome(0.0, {}, chunk.error)
            elif left:
                self._queue.extendleft([left[len(left) // 2 :], left[: len(left) // 2]])

    def _quick(self, item: RewardItem) -> ScoringOutcome | None:
        if self.spec.name == "words" and item.label.split():
            return ScoringOutcome(words_reward(prompt="", completion=item.completion, label=item.label, metadata={}))
        if self.spec.name != "math":
            return None
        verdict = quick_math_reward(item.completion, item.label, item.metadata)
        return None if verdict is None else ScoringOutcome(verdict)

    def _chunks(self, places: list[int]) -> Iterator[list[int]]:
        share = -(-len(places) // len(self._workers))
        size = share if self._batched else max(1, min(self._largest, share))
        return (places[start : start + size] for start in range(0, len(places), max(1, size)))

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.close()


def score_at_once(pools: Sequence[FunctionPool], items: Sequence[RewardItem]) -> list[dict[int, ScoringOutcome]]:
    """Score all items by all functions, at the same time; the outcomes of each pool by place."""
    for pool in pools:
        pool.begin(items)
    while True:
        for pool in pools:
            pool.feed()
        busy = [worker for pool in pools for worker in pool.busy]
        if not busy:
            return [pool.outcomes for pool in pools]
        limit = min(worker.deadline for worker in busy) - time.monotonic()
        wait([worker.connection for worker in busy], max(0.0, limit))
        for pool in pools:
            pool.collect()
