"""The same measurements on two ranks over gloo: collectives, peak of a rank, errors, CPU seconds of both ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from head_peers.registry import OURS_B, Method, by_name
from head_peers.task import Size, Task, make_task, quick_task

from head_bench.counters import counted, peak_bytes
from head_bench.reference import Reference, errors_of, reference
from head_bench.timing import Ratio, cpu_seconds, keep_pages, paired_ratios, steadiest
from megatron_dppo.types import LossInputs

RANKS = 2
CHUNKS = 3
"""of our own head, while the collectives are counted"""
_MINUTES = 30


def measure(
    methods: Sequence[Method], counts: Size, time_size: Size | None, rounds: int, fresh_pages: bool
) -> dict[str, Any]:
    """Per method: what ``_counts`` returns and, with a size for it, ``time``."""
    names = [m.name for m in methods if m.tensor_parallel]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_child, (folder, names, counts, time_size, rounds, fresh_pages), nprocs=RANKS, join=True)
        return json.loads((Path(folder) / "result.json").read_text())


def _child(
    rank: int, folder: str, names: Sequence[str], counts: Size, time_size: Size | None, rounds: int, fresh_pages: bool
) -> None:
    torch.set_num_threads(1)
    if not fresh_pages:
        keep_pages()
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=_MINUTES))
    try:
        group = dist.group.WORLD
        whole = make_task(counts)
        exact = {with_ids: reference(whole, with_ids) for with_ids in (False, True)}
        task = whole.shard(group)
        found = {name: _counts(by_name(name), task, exact) for name in names}
        if time_size is not None:
            ratios = _times([by_name(name) for name in names], quick_task(time_size).shard(group), rounds)
            for name, ratio in ratios.items():
                found[name]["time"] = ratio.as_dict()
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def _counts(method: Method, task: Task, exact: dict[bool, Reference]) -> dict[str, Any]:
    """``loss_calls`` (mode B: chunks), ``collectives`` and ``backward_collectives`` as [name, bytes], ``peak`` in bytes
    and ``errors``."""
    record: list[LossInputs] = []
    fresh = replace(task.fresh(), record=record, chunk_tokens=-(-len(task.hidden) // CHUNKS))
    with counted() as forward:
        output = method.forward(fresh)
    with counted() as backward:
        output.loss_sum.backward()
    del output, fresh
    ready = task.fresh()
    with_ids = method.offers_ids(RANKS)
    errors = errors_of(method.run, task, exact[with_ids])
    return {
        "loss_calls": len(record),
        "collectives": forward.collectives,
        "backward_collectives": backward.collectives,
        "peak": peak_bytes(lambda: method.run(ready)),
        "errors": asdict(errors),
    }


def _times(methods: Sequence[Method], task: Task, rounds: int) -> dict[str, Ratio]:
    runs: dict[str, Callable[[], None]] = {m.name: runner(m, task) for m in methods}
    return steadiest(
        lambda attempt: paired_ratios(runs, OURS_B.name, rounds, clock=_both_ranks, seed=attempt), attempts=2
    )


def runner(method: Method, task: Task) -> Callable[[], None]:
    """One forward and backward pass on leaves that start without gradients."""

    def run() -> None:
        task.hidden.grad = task.weight.grad = None
        method.run(task)

    return run


def three_products(task: Task) -> Callable[[], None]:
    """Logits, dH and dW of all tokens at once, in the dtype of the model: the limit of every method here."""
    hidden, weight = task.hidden.detach(), task.weight.detach()

    def run() -> None:
        logits = hidden @ weight.t()
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    return run


def _both_ranks(run: Callable[[], None]) -> float:
    dist.barrier()
    seconds = torch.tensor(cpu_seconds(run), dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds)
