"""The sweep on one GPU: times as ratios to the three plain products in the same process, and peaks.

A shard of tensor parallelism is a smaller vocabulary here: one GPU has no collectives to measure. Inputs rotate between
two sets. Methods that run out of memory, and packages that are not installed, are named.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_peers.ours import mode_a
from head_peers.registry import METHODS, OURS_A, OURS_B, Method
from head_peers.task import Size, Task, compute_loss, make_task, quick_task

from head_bench.counters import peak_bytes
from head_bench.one_process import runner, three_products
from head_bench.reference import measure_errors, reference
from head_bench.report import environment
from head_bench.timing import cpu_seconds, paired_ratios, steadiest
from head_bench.wheels import installed

_BASE = "3 products"
Run = Callable[[], None]


@dataclass(frozen=True)
class Scale:
    """Sizes that a sweep visits."""

    tokens: int
    vocab: int
    hidden: int
    shards: tuple[int, ...]
    chunks: tuple[int, ...]
    topks: tuple[int, ...]
    lengths: tuple[int, ...]
    zero_shares: tuple[float, ...] = (0.0, 0.2, 0.4)


SCALES = {
    "cuda": Scale(
        32768, 151936, 2048, (1, 2, 4, 8), (2048, 4096, 8192, 16384), (1, 20, 64, 100), (8192, 32768, 131072)
    ),
    "cpu": Scale(64, 2048, 32, (1, 4), (16, 64), (4, 8), (32, 64)),
}


@dataclass
class Sweep:
    """A device and the measurements so far."""

    device: str
    rounds: int
    scale: Scale
    measurements: dict[str, Any] = field(default_factory=dict)

    def clock(self, run: Run) -> float:
        """Return the seconds of a run on the device."""
        if self.device == "cpu":
            return cpu_seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    def peak(self, run: Run) -> int:
        """Return the peak bytes of a run beyond those before it, including gradients of head and hidden states."""
        if self.device == "cpu":
            return peak_bytes(run)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def sizes(self, shards: int, topk: int = 64, share: float = 0.0) -> Size:
        """Return the size of one rank's share."""
        topk = min(topk, max(self.scale.topks))
        return Size(self.scale.tokens, self.scale.vocab // shards, self.scale.hidden, topk, zero_share=share)

    def compare(self, title: str, runs: dict[str, Run]) -> None:
        """Measure time and peak of each run; a run that fails is printed with its error and skipped."""
        lines, fits = {}, {}
        for name, run in runs.items():
            try:
                run()
                lines[name] = {"peak_bytes": self.peak(run)}
                fits[name] = run
            except Exception as error:  # of a peer's own code, or out of memory
                lines[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
            self.release()
        ratios = steadiest(
            lambda attempt: paired_ratios(fits, _BASE, self.rounds, clock=self.clock, seed=attempt), attempts=2
        )
        for name, ratio in ratios.items():
            lines[name] |= ratio.as_dict()
        self.measurements[title] = lines
        print(f"\n{title}")
        for name, line in lines.items():
            shown = line.get("failed") or f"{ratios[name]}  {line['seconds'] * 1e3:9.2f} ms"
            print(f"  {name:<28}{line.get('peak_bytes', 0) / 2**20:>10,.0f} MiB  {shown}")

    def release(self) -> None:
        """Free cached memory between runs."""
        if self.device == "cuda":
            torch.cuda.empty_cache()


def main(out: Path, device: str, rounds: int, parts: Sequence[int] | None = None) -> int:
    """Run, print and write the sweep to ``out/head_<device>.json``; return 1 if an error exceeds its bound."""
    scale = SCALES[device]
    sweep = Sweep(device, rounds, replace(scale, shards=tuple(parts or scale.shards)))
    wheels, missing = installed()
    for name, reason in missing.items():
        print(f"not installed: {name} ({reason})")
    good = _errors(sweep, wheels)
    for shards in sweep.scale.shards:
        _chunk_sizes(sweep, shards)
        _peers(sweep, shards, wheels)
    _variants(sweep, sweep.scale.shards[len(sweep.scale.shards) // 2])
    _lengths(sweep)
    out.mkdir(parents=True, exist_ok=True)
    about = environment(device) | {"not_installed": missing}
    (out / f"head_{device}.json").write_text(
        json.dumps({"environment": about, "found": sweep.measurements}, indent=2) + "\n"
    )
    return 0 if good else 1


def _errors(sweep: Sweep, wheels: list[Method]) -> bool:
    good = True
    task = make_task(Size(256, 8192, 256, 16, zero_share=0.4), sweep.device)
    exact = {with_ids: reference(task, with_ids) for with_ids in (False, True)}
    for method in (*METHODS, *wheels):
        try:
            errors = measure_errors(method.run, task, exact[method.offers_ids(1)]).as_dict()
        except Exception as error:  # a sum has nothing a token; a foreign kernel may fail in any way
            print(f"errors of {method.name}: {type(error).__name__}: {error}"[:160])
            good &= not method.ours
            continue
        print(f"errors of {method.name}: {errors}")
        sweep.measurements.setdefault("errors", {})[method.name] = errors
        if method.ours:
            good &= (errors["logprobs"] or 0) <= 1e-5 and max(errors["grad_hidden"], errors["grad_weight"]) <= 2.5e-3
    return good


def _tasks(sweep: Sweep, size: Size) -> list[Task]:
    return [quick_task(size, sweep.device, seed) for seed in range(2)]


def _rotating(method: Callable[[Task], Run], tasks: list[Task]) -> Run:
    turns = itertools.cycle([method(task) for task in tasks])
    return lambda: next(turns)()


def _chunk_sizes(sweep: Sweep, shards: int) -> None:
    tasks = _tasks(sweep, sweep.sizes(shards))
    runs = {_BASE: _rotating(three_products, tasks)}
    for chunk in sweep.scale.chunks:
        cut = [replace(task, chunk_tokens=chunk) for task in tasks]
        runs[f"B, {chunk} tokens"] = _rotating(partial(runner, OURS_B), cut)
        runs[f"A, {chunk} tokens"] = _rotating(partial(runner, OURS_A), cut)
    sweep.compare(f"chunk size, V / {shards}", runs)


def _peers(sweep: Sweep, shards: int, wheels: list[Method]) -> None:
    tasks = _tasks(sweep, sweep.sizes(shards))
    runs = {_BASE: _rotating(three_products, tasks)}
    for method in (*METHODS, *wheels):
        name = method.name if method.ours or method in wheels else f"{method.name} (re-expressed)"
        runs[name] = _rotating(partial(runner, method), tasks)
    sweep.compare(f"peers, V / {shards}", runs)


def _variants(sweep: Sweep, shards: int) -> None:
    base = _tasks(sweep, sweep.sizes(shards))
    runs = {_BASE: _rotating(three_products, base)}
    for topk in sweep.scale.topks:
        tasks = _tasks(sweep, sweep.sizes(shards, topk))
        runs[f"B, K = {topk}"] = _rotating(partial(runner, OURS_B), tasks)
    runs["A"] = _rotating(partial(runner, OURS_A), base)
    topk = min(64, max(sweep.scale.topks))
    with_topk = replace(OURS_A, forward=lambda task: compute_loss(task, mode_a(task, topk=topk)))
    runs[f"A, own Top-{topk}"] = _rotating(partial(runner, with_topk), base)
    for share in sweep.scale.zero_shares:
        tasks = _tasks(sweep, sweep.sizes(shards, share=share))
        runs[f"B, {share:.0%} zero rows"] = _rotating(partial(runner, OURS_B), tasks)
    bonus = _tasks(sweep, replace(sweep.sizes(shards), entropy_gradient=True))
    runs["B, entropy bonus"] = _rotating(partial(runner, OURS_B), bonus)
    sweep.compare(f"variants, V / {shards}", runs)


def _lengths(sweep: Sweep) -> None:
    for shards in (sweep.scale.shards[0], sweep.scale.shards[-1]):
        for tokens in sweep.scale.lengths:
            task = quick_task(replace(sweep.sizes(shards), tokens=tokens), sweep.device)
            peaks = {method.name: sweep.peak(runner(method, task)) for method in (OURS_B, OURS_A)}
            sweep.measurements.setdefault("peak", {})[f"N = {tokens}, V / {shards}"] = peaks
            print(f"peak, N = {tokens}, V / {shards}: { {name: f'{p / 2**20:,.0f} MiB' for name, p in peaks.items()} }")
            del task
            sweep.release()
