"""Times of all methods in one new process, so that nothing that ran before has touched its memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from head_peers.registry import OURS_B, Method, by_name
from head_peers.task import Size, Task, quick_task

from head_bench.timing import Ratio, cpu_seconds, paired_ratios, steadiest, use_pages

ZERO_ROWS, LIMIT = "ours B, zero rows", "three products"
"""Names of two more runs: a share of zero advantages; the products alone."""


def measure(
    methods: Sequence[Method], size: Size, zero_share: float, pages: str, rounds: int, attempts: int
) -> dict[str, Ratio]:
    """Measure CPU times of methods, ``ZERO_ROWS`` and ``LIMIT`` relative to ours B; ``pages`` as in ``use_pages``."""
    names = [method.name for method in methods]
    return in_one_process(_times, size, pages, rounds, attempts, names, zero_share)


def in_one_process(times: Callable[..., dict[str, Ratio]], size: Size, pages: str, *arguments: Any) -> dict[str, Ratio]:
    """Run ``times(size, *arguments)`` in a new process with one thread; ``pages`` as in ``use_pages``."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_child, times, size, pages, *arguments).result()


def _child(times: Callable[..., dict[str, Ratio]], size: Size, pages: str, *arguments: Any) -> dict[str, Ratio]:
    torch.set_num_threads(1)
    use_pages(pages)
    return times(size, *arguments)


def _times(size: Size, rounds: int, attempts: int, names: Sequence[str], zero_share: float) -> dict[str, Ratio]:
    task, zero = quick_task(size), quick_task(replace(size, zero_share=zero_share))
    runs = {name: runner(by_name(name), task) for name in names}
    runs |= {ZERO_ROWS: runner(OURS_B, zero), LIMIT: three_products(task)}
    return steadiest(
        lambda attempt: paired_ratios(runs, OURS_B.name, rounds, clock=cpu_seconds, seed=attempt), attempts
    )


def runner(method: Method, task: Task) -> Callable[[], None]:
    """Return a forward and backward pass on leaves that start without gradients."""

    def run() -> None:
        task.hidden.grad = None
        method.run(task)

    return run


def three_products(task: Task) -> Callable[[], None]:
    """Return a run of logits, dH and dW of all tokens in the model dtype: the lower limit of every method."""
    hidden, weight = task.hidden.detach(), task.weight.detach()

    def run() -> None:
        logits = hidden @ weight.t()
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    return run
