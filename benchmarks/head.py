"""The DPPO head against the methods of other stacks: memory, products, traffic, collectives, errors, then time.

    python benchmarks/head.py                  counts and gates, a minute or two, then a short timing
    python benchmarks/head.py --gates-only     the counts and gates alone: what CI runs
    python benchmarks/head.py --full           the sizes of docs/results/head.md
    python benchmarks/head.py --sweep          times at sizes on both sides of each change of method
    python benchmarks/head.py --needs          what predicted directions, score centering and filters cost
    python benchmarks/head.py --device cuda    the sweep on a GPU

Every method gets the same task: DPPO's loss of N tokens and its gradients with respect to hidden states and head, that
of the head added to Megatron's fp32 ``main_grad`` as in training. The table says what each of them offers (a
log-probability at the label, b at K ids of each token, c own Top-K, d entropy), and ``*`` marks those that do the whole
task. Exit code 1 when one of the deterministic gates fails; never for a time. The peers are re-expressions in plain
torch of what their code does: CPU ratios are not GPU ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from head_bench import needs, one_process, report, tensor_parallel
from head_bench.counters import counted, peak_bytes
from head_bench.reference import Errors, measure_errors, reference
from head_bench.results import Check, Results, Row, gates, goals, select_methods
from head_bench.timing import PAGES
from head_peers.registry import METHODS, OURS_A, OURS_B, Method
from head_peers.task import Size, Task, make_task, quick_task

ZERO_SHARE = 0.4


@dataclass(frozen=True)
class Profile:
    """Sizes of one kind of run."""

    counts: Size
    errors: Size
    parallel: Size
    time: Size
    peak: Size
    parallel_time: Size | None = None


SHORT = Profile(
    counts=Size(512, 32768, 64, 16),
    errors=Size(192, 8192, 64, 16),
    parallel=Size(192, 8192, 64, 16),
    time=Size(256, 16384, 128, 16),
    peak=Size(2048, 151936, 128, 64),
)
FULL = Profile(
    counts=Size(512, 32768, 256, 64),
    errors=Size(192, 20480, 256, 64),
    parallel=Size(192, 20480, 256, 64),
    time=Size(512, 32768, 256, 64),
    parallel_time=Size(512, 32768, 256, 64),
    peak=Size(2048, 151936, 128, 64),
)

SWEEP = (
    Size(512, 32768, 256, 64),
    Size(2048, 32768, 256, 64),
    Size(4096, 32768, 256, 64),
    Size(512, 151936, 256, 64),
    Size(512, 32768, 1024, 64),
    Size(2048, 32768, 1024, 64),
)
"""One and several chunks of logits (96 MB), one and several parts of gradients (192 MB), a narrow and a wide head."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return 1 if a gate fails."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    if options.device == "cuda" or options.rehearse_cuda:
        from head_bench import cuda

        return cuda.main(options.out, "cuda" if options.device == "cuda" else "cpu", options.rounds, options.shards)
    profile = FULL if options.full else SHORT
    if options.needs:
        times = {pages: needs.measure(profile.time, pages, options.rounds, options.attempts) for pages in PAGES}
        print(f"{profile.time}\n\n{needs.table(needs.products(profile.time), times)}")
        return 0
    methods = select_methods(options.methods, METHODS)
    if options.sweep:
        _sweep(methods, options)
        return 0
    results = _measure(methods, profile, options)
    checks = {"gates": gates(results)} | ({"goals": goals(results)} if options.full else {})
    _show(results, checks, options.out)
    return 0 if all(check.holds for check in checks["gates"]) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gates-only", action="store_true", help="no times")
    parser.add_argument("--full", action="store_true", help="the sizes that the figures in docs/ are of")
    parser.add_argument("--needs", action="store_true", help="the costs of our own head's further needs alone")
    parser.add_argument("--sweep", action="store_true", help="times at further sizes alone, kept pages")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--attempts", type=int, default=3, help="repeat a timing whose spread is above 15 %%")
    parser.add_argument("--entropy-gradient", action="store_true", help="an entropy bonus; leaves TRL out")
    parser.add_argument("--methods", nargs="+", help="only these, ours and Stable-RL")
    parser.add_argument("--shards", type=int, nargs="+", help="on a GPU: parts of the vocabulary (default 1 2 4 8)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark_head"))
    parser.add_argument("--rehearse-cuda", action="store_true", help="the code of --device cuda, tiny, on the CPU")
    return parser.parse_args(arguments)


def _measure(methods: list[Method], profile: Profile, options: argparse.Namespace) -> Results:
    if options.entropy_gradient:
        methods = [m for m in methods if "d" in m.gradients.split()]
        sizes = {k: v if v is None else replace(v, entropy_gradient=True) for k, v in vars(profile).items()}
        profile = Profile(**sizes)
    _say("errors against float64")
    errors = _errors(methods, profile.errors)
    _say("counts")
    task = quick_task(profile.counts)
    rows = [_counts(method, task, profile.counts, errors[method.name]) for method in methods]
    zero = quick_task(replace(profile.counts, zero_share=ZERO_SHARE))
    zero_gemms = {m.name: _counts(m, zero, profile.counts, {}).gemms for m in (OURS_A, OURS_B)}
    del task, zero
    results = Results(rows, {k: v for k, v in vars(profile).items() if v is not None}, ZERO_SHARE, zero_gemms)
    if not options.gates_only:
        _say("times")
        _times(results, profile, options)
    _say("peaks")
    _full_peaks([row for row in rows if options.full or row.method.ours], profile.peak)
    _say("two ranks")
    parallel = tensor_parallel.measure(methods, profile.parallel)
    for row in rows:
        row.parallel = parallel.get(row.method.name)
    return results


def _errors(methods: list[Method], size: Size) -> dict[str, dict[str, Errors]]:
    errors: dict[str, dict[str, Errors]] = {method.name: {} for method in methods}
    for dtype in (torch.bfloat16, torch.float32):
        task = make_task(replace(size, dtype=dtype, zero_share=ZERO_SHARE))
        exact = {with_ids: reference(task, with_ids) for with_ids in (False, True)}
        for method in methods:
            name = str(dtype).removeprefix("torch.")
            errors[method.name][name] = measure_errors(method.run, task, exact[method.offers_ids(1)])
    return errors


def _counts(method: Method, task: Task, size: Size, errors: dict[str, Errors]) -> Row:
    fresh = task.fresh()
    with counted() as counts:
        method.run(fresh)
    fresh = task.fresh()
    logits = size.tokens * size.vocab
    return Row(
        method,
        gemms=counts.flops / (2 * logits * size.hidden),
        traffic=counts.traffic / logits,
        large_traffic=counts.large_traffic / logits,
        peak=peak_bytes(lambda: method.run(fresh)),
        errors=errors,
    )


def _full_peaks(rows: list[Row], size: Size) -> None:
    task = quick_task(size)
    for row in rows:
        fresh = task.fresh()
        row.full_peak = peak_bytes(lambda method=row.method, leaves=fresh: method.run(leaves))


def _times(results: Results, profile: Profile, options: argparse.Namespace) -> None:
    methods = [row.method for row in results.rows]
    for pages in PAGES:
        times = one_process.measure(methods, profile.time, ZERO_SHARE, pages, options.rounds, options.attempts)
        results.zero_times[pages], results.limits[pages] = times[one_process.ZERO_ROWS], times[one_process.LIMIT]
        for row in results.rows:
            row.times[pages] = times[row.method.name]
        if profile.parallel_time is None:
            continue
        for name, ratio in tensor_parallel.measure_times(methods, profile.parallel_time, pages, options.rounds).items():
            results.row(name).parallel_times[pages] = ratio


def _sweep(methods: list[Method], options: argparse.Namespace) -> None:
    """Print the times at the sizes of ``SWEEP``, and write them."""
    times = {}
    for size in SWEEP:
        _say(str(size))
        times[str(size)] = one_process.measure(methods, size, ZERO_SHARE, "kept", options.rounds, options.attempts)
    print(report.sweep_table(times))
    options.out.mkdir(parents=True, exist_ok=True)
    report.write_sweep(options.out / "head_sweep.json", times, report.environment("cpu"))


def _say(part: str) -> None:
    print(f"measuring: {part}", file=sys.stderr, flush=True)


def _show(results: Results, checks: dict[str, list[Check]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    print(report.table(results))
    for name, size in results.sizes.items():
        print(f"{name}: {size}")
    for pages, ratio in results.zero_times.items():
        print(f"{pages} pages: ours B with {results.zero_share:.0%} zero advantages over none: {ratio}")
        print(f"{pages} pages: three plain products alone over ours B: {results.limits[pages]}")
    for kind, kind_checks in checks.items():
        print(f"\n{kind}")
        for check in kind_checks:
            print(f"  {check}")
    report.write_json(out / "head.json", results, checks, report.environment("cpu"))
    report.plot(out / "head.png", results)
    print(f"\nwritten: {out / 'head.json'}, {out / 'head.png'}")


if __name__ == "__main__":
    sys.exit(main())
