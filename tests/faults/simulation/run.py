"""Many schedules over several processes, one schedule with its log, and the smallest set of faults that still fails."""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.faults.simulation.faults import Plan, draw
from tests.faults.simulation.outcome import Outcome
from tests.faults.simulation.seams import installed
from tests.faults.simulation.world import simulate

_BATCH = 50


def run_seeds(seeds: range) -> list[Outcome]:
    """The outcomes of some seeds, in this process."""
    if not gc.get_freeze_count():  # what is imported stays: the search for cycles need not walk through it
        gc.collect()
        gc.freeze()
    gc.disable()
    outcomes = []
    begin = time.process_time()
    with installed():
        for i, seed in enumerate(seeds):
            outcomes.append(simulate(draw(seed)))
            if i % 20 == 19:
                gc.collect()
    gc.enable()
    for outcome in outcomes:
        outcome.cpu_seconds = (time.process_time() - begin) / len(seeds)
    return outcomes


def run_many(first: int, count: int, processes: int, *, until_failure: bool = False) -> int:
    """Print what many seeds found; 1 when an invariant broke."""
    size = 10 if until_failure else _BATCH
    batches = [range(start, min(start + size, first + count)) for start in range(first, first + count, size)]
    begin = time.perf_counter()
    failed: list[Outcome] = []
    ends: Counter[str] = Counter()
    total = Counter[str]()
    cpu = 0.0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for outcomes in pool.imap(run_seeds, batches):
            for outcome in outcomes:
                cpu += outcome.cpu_seconds
                ends[outcome.end.split(":")[0]] += 1
                total["tokens"] += outcome.tokens
                total["faults"] += len(outcome.happened)
                total["rounds"] += outcome.rounds
                total["guard"] += bool(outcome.guard_only)
                total["unseen"] += bool(outcome.unseen)
                if outcome.failed:
                    failed.append(outcome)
                    print(f"seed {outcome.plan.seed}: {outcome.violations[0]:.300}", flush=True)
            if failed and until_failure:
                break
    seconds = time.perf_counter() - begin
    print(
        f"{count} schedules in {seconds:.1f} s on {processes} processes ({60 * count / seconds:.0f} a minute, "
        f"{1000 * cpu / count:.1f} ms of CPU each): "
        f"{total['faults']} faults, {total['tokens']} tokens proved, {total['rounds']} rounds of the event loop; "
        f"ends: {dict(ends.most_common())}; stopped by the guard alone: {total['guard']}; "
        f"trained on a lie that nothing can see before the next sync: {total['unseen']}; {len(failed)} failed"
    )
    for kind, alike in _by_kind(failed).items():
        print(f"  {len(alike):5d} x {kind}\n          seeds {[outcome.plan.seed for outcome in alike[:8]]}")
    return 1 if failed else 0


def _by_kind(failed: list[Outcome]) -> dict[str, list[Outcome]]:
    """By the first violation without its numbers, the most frequent first."""
    kinds: dict[str, list[Outcome]] = {}
    for outcome in failed:
        text = outcome.violations[0].replace("\n", " ")
        kinds.setdefault(re.sub(r"[-+]?[0-9][-0-9.e]*", "#", text)[:240], []).append(outcome)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def run_one(seed: int, *, verbose: bool, shrink: bool) -> int:
    """Print what one seed finds; 1 when an invariant broke."""
    plan = draw(seed)
    with installed():
        if shrink:
            plan = shrunk(plan, simulate)
        print(plan)
        for fault in plan.faults:
            print(f"  {fault}")
        outcome = simulate(plan, print if verbose else None)
    print(f"{outcome.end} after {outcome.seconds:.1f} virtual seconds and {outcome.lives} lives of the trainer")
    for text in outcome.violations:
        print(f"VIOLATION {text}")
    return 1 if outcome.failed else 0


def shrunk(
    plan: Plan, run: Callable[[Plan], Outcome], fails: Callable[[Outcome], bool] = lambda outcome: outcome.failed
) -> Plan:
    """The plan with as few faults as still make it fail, each left out in turn until none can be."""
    again = True
    while again:
        again = False
        for fault in plan.faults:
            smaller = replace(plan, faults=tuple(f for f in plan.faults if f is not fault))
            if fails(run(smaller)):
                plan, again = smaller, True
                break
    return plan
