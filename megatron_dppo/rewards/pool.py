"""The worker processes of one reward function, and the loop that several functions' processes share."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from megatron_dppo.functions import content_hash
from megatron_dppo.rewards.functions import FunctionSpec, load
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.scoring import ScoringOutcome
from megatron_dppo.rewards.worker import Worker


class FunctionPool:
    """One function and its worker processes. Samples that need no process are scored in this one."""

    def __init__(
        self, spec: FunctionSpec, timeout_seconds: float, num_workers: int, *, async_concurrency: int = 64
    ) -> None:
        loaded = load(spec)
        # A worker that is started later must not load an edited file.
        self.spec = replace(spec, content=content_hash(spec.name))
        self._quick_score = loaded.quick
        self._is_batched = loaded.convention.is_batched
        self._max_chunk_size = async_concurrency if loaded.is_async else 1
        concurrent = loaded.is_async and not self._is_batched
        self._workers = [Worker(self.spec, timeout_seconds, concurrent=concurrent) for _ in range(num_workers)]
        self._items: Sequence[RewardItem] = ()
        self._queue = deque[list[int]]()
        self._idle: list[Worker] = []
        self.busy: list[Worker] = []
        self.outcomes: dict[int, ScoringOutcome] = {}
        """Outcomes of the samples in ``begin``, by index."""

    def begin(self, items: Sequence[RewardItem]) -> None:
        """Queue samples, and start as many processes as they need."""
        self._items = items
        # Score what needs no process at once, and queue the others in chunks.
        quick = ((index, self._quick(item)) for index, item in enumerate(items))
        self.outcomes = {index: outcome for index, outcome in quick if outcome is not None}
        self._queue = deque(self._chunks([index for index in range(len(items)) if index not in self.outcomes]))
        self._idle = list(self._workers)
        self.busy = []
        for worker in self._workers:
            worker.begin_step()
        # Start processes before the first submit, so that several functions start concurrently.
        for worker in self._idle[: len(self._queue)]:
            worker.launch()

    def feed(self) -> None:
        """Submit queued chunks to idle processes."""
        while self._queue and self._idle:
            self.busy.append(worker := self._idle.pop(0))
            worker.submit(self._queue.popleft(), self._items)

    def collect(self) -> None:
        """Read the results of busy processes, and kill those over their time limit."""
        for worker in list(self.busy):
            chunk = worker.receive()
            if chunk is None:
                continue
            self.busy.remove(worker)
            self._idle.append(worker)
            self.outcomes |= chunk.outcomes
            unscored = chunk.unscored
            if len(unscored) == 1:
                self.outcomes[unscored[0]] = ScoringOutcome(0.0, {}, chunk.error)
            elif unscored:
                # Split a failed chunk until the sample at fault is alone. extendleft reverses the order.
                middle = len(unscored) // 2
                self._queue.extendleft([unscored[middle:], unscored[:middle]])

    def _quick(self, item: RewardItem) -> ScoringOutcome | None:
        if self._quick_score is None:
            return None
        score = self._quick_score(item.completion, item.label, item.metadata)
        return None if score is None else ScoringOutcome(score)

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        # A batch function gets one chunk per worker, an async function several samples, any other a single one.
        share = -(-len(indices) // len(self._workers))
        size = share if self._is_batched else max(1, min(self._max_chunk_size, share))
        return (indices[start : start + size] for start in range(0, len(indices), max(1, size)))

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.close()


def score_concurrently(
    pools: Sequence[FunctionPool], items: Sequence[Sequence[RewardItem]]
) -> list[dict[int, ScoringOutcome]]:
    """Score the items of each function, all functions at the same time; return each pool's outcomes by index."""
    for pool, pool_items in zip(pools, items, strict=True):
        pool.begin(pool_items)
    while True:
        for pool in pools:
            pool.feed()
        busy = [worker for pool in pools for worker in pool.busy]
        if not busy:
            return [pool.outcomes for pool in pools]
        # Sleep until a process replies or the earliest deadline passes.
        limit = min(worker.deadline for worker in busy) - time.monotonic()
        wait([worker.connection for worker in busy], max(0.0, limit))
        for pool in pools:
            pool.collect()
