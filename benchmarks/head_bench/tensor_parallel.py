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
from head_bench.one_process import runner
from head_bench.reference import Reference, measure_errors, reference
from head_bench.timing import Ratio, cpu_seconds, paired_ratios, steadiest, use_pages
from megatron_dppo.types import LossInputs

RANKS = 2
CHUNKS = 3
"""Chunks of our head while the collectives are counted."""
_MINUTES = 30


def measure(methods: Sequence[Method], counts: Size) -> dict[str, Any]:
    """Return the result of ``_counts`` for each method."""
    return _spawn(_count_child, methods, counts)


def measure_times(methods: Sequence[Method], size: Size, pages: str, rounds: int) -> dict[str, Ratio]:
    """Measure CPU seconds of both ranks relative to ours B; ``pages`` as in ``timing.use_pages``."""
    result = _spawn(_time_child, methods, size, pages, rounds)
    return {name: Ratio(**ratio) for name, ratio in result.items()}


def _spawn(child: Callable[..., dict[str, Any]], methods: Sequence[Method], *arguments: Any) -> dict[str, Any]:
    names = [m.name for m in methods if m.tensor_parallel]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, child, names, *arguments), nprocs=RANKS, join=True)
        return json.loads((Path(folder) / "result.json").read_text())


def _rank(rank: int, folder: str, child: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=_MINUTES))
    try:
        result = child(*arguments)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def _count_child(names: Sequence[str], size: Size) -> dict[str, Any]:
    full_task = make_task(size)
    exact = {with_ids: reference(full_task, with_ids) for with_ids in (False, True)}
    task = full_task.shard(dist.group.WORLD)
    return {name: _counts(by_name(name), task, exact) for name in names}


def _time_child(names: Sequence[str], size: Size, pages: str, rounds: int) -> dict[str, Any]:
    use_pages(pages)
    task = quick_task(size).shard(dist.group.WORLD)
    runs = {name: runner(by_name(name), task) for name in names}
    result = steadiest(
        lambda attempt: paired_ratios(runs, OURS_B.name, rounds, clock=_both_ranks, seed=attempt), attempts=2
    )
    return {name: asdict(ratio) for name, ratio in result.items()}


def _counts(method: Method, task: Task, exact: dict[bool, Reference]) -> dict[str, Any]:
    """Return the counts of one method.

    They are ``loss_calls`` (mode B: chunks), ``collectives`` and ``backward_collectives`` as [name, bytes], ``peak`` in
    bytes and ``errors``.
    """
    record: list[LossInputs] = []
    fresh = replace(task.fresh(), record=record, chunk_tokens=-(-len(task.hidden) // CHUNKS))
    with counted() as forward:
        output = method.forward(fresh)
    with counted() as backward:
        output.loss_sum.backward()
    del output, fresh
    ready = task.fresh()
    with_ids = method.offers_ids(RANKS)
    errors = measure_errors(method.run, task, exact[with_ids])
    return {
        "loss_calls": len(record),
        "collectives": forward.collectives,
        "backward_collectives": backward.collectives,
        "peak": peak_bytes(lambda: method.run(ready)),
        "errors": asdict(errors),
    }


def _both_ranks(run: Callable[[], None]) -> float:
    dist.barrier()
    seconds = torch.tensor(cpu_seconds(run), dtype=torch.float64)
    dist.all_reduce(seconds)
    return float(seconds)
