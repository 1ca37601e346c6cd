"""Scores batches of completions; a failing or hanging reward costs that sample only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.math import quick_math_reward
from megatron_dppo.rewards.worker import Worker, load_function


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """What a reward function gets, as keyword arguments: ``f(*, prompt, completion, label, metadata) -> float``.

    ``metadata`` holds the other columns of the data row and ``finish_reason`` (``stop`` or ``length``).
    """

    prompt: str
    completion: str
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A reward, or why there is none."""

    reward: float
    failed: bool = False
    error: str = ""


class RewardScorer:
    """Scores items in worker processes; answers that need no parser are scored here.

    Args:
        function: ``math`` or ``module:function``.
        timeout_seconds: limit for one sample; the worker is killed then.
        num_workers: processes.

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(self, function: str, timeout_seconds: float, num_workers: int) -> None:
        load_function(function)
        self._is_math = function == "math"
        self._name = function
        self._workers = [Worker(function, timeout_seconds) for _ in range(num_workers)]

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order.

        Raises:
            RewardError: every one of several items failed, so the function itself is broken.
        """
        results: list[RewardResult | None] = [self._quick(item) for item in items]
        waiting = [i for i, result in enumerate(results) if result is None]
        for start in range(0, len(waiting), len(self._workers)):
            round_ = list(zip(waiting[start : start + len(self._workers)], self._workers, strict=False))
            for i, worker in round_:
                worker.submit(vars(items[i]))
            for i, worker in round_:
                reward, error = worker.result()
                results[i] = RewardResult(reward=reward, failed=bool(error), error=error)
        final = [result for result in results if result is not None]
        if len(final) > 1 and all(result.failed for result in final):
            raise RewardError(
                f"reward.function = {self._name!r} failed on all {len(final)} samples; first error: {final[0].error}"
            )
        return final

    def _quick(self, item: RewardItem) -> RewardResult | None:
        if not self._is_math:
            return None
        verdict = quick_math_reward(item.completion, item.label, item.metadata)
        return None if verdict is None else RewardResult(reward=verdict)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.close()
