"""``python -m tests.faults.kill_points``: kill runs at points, resume them, print a table of what went wrong."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kill_points import launcher
from tests.faults.kill_points.cases import MODES, Case, Reference, Result, phase_of, reference, run_case
from tests.faults.kill_points.mutations import MUTATIONS
from tests.faults.kill_points.variants import VARIANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 when a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="only this one (again: and that one)")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this way to die")
    parser.add_argument("--point", help="only this point, by its name")
    parser.add_argument("--first", default="", help="the point of an earlier kill")
    parser.add_argument("--limit", type=int, help="so many cases, of all phases")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    parser.add_argument("--mutations", action="store_true", help="break the program: each way has to be found")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    launcher.warm_up()
    with tempfile.TemporaryDirectory(prefix="kill_points_") as place:
        root = Path(place)
        names = options.variant or (["plain"] if options.mutations else list(VARIANTS))
        # A sample has second kills of one variant: each one's cost four runs more to know.
        resumed = [] if options.mutations else names[:1] if options.limit else names
        references = find_references(names, resumed, root, options.jobs)
        for name, known in references.items():
            print(
                f"{name:10}{len(known.points):6} points, {sum(map(len, known.resume_points.values()))} of resumptions"
            )
        if options.mutations:
            return 0 if find_mutations(references["plain"], root) else 1
        if options.point:
            cases = [Case(names[0], (options.mode or ["node"])[0], options.point, options.first)]
        else:
            cases = chosen(references, options.mode or list(MODES))[: options.limit]
        if options.list:
            print("\n".join(f"{case.phase:12} {case.command}" for case in cases))
            return 0
        deadline = started + 60 * options.minutes
        results = run_all(cases, references, root, options.jobs, deadline)
    failed = report(results)
    print(f"{len(results)} of {len(cases)} cases in {(time.monotonic() - started) / 60:.1f} minutes, {failed} failed")
    return 1 if failed else 0


def find_references(names: Sequence[str], resumed: Sequence[str], root: Path, jobs: int) -> dict[str, Reference]:
    """Run the variants undisturbed, in ``jobs`` processes that are forked from this one.

    Args:
        names: of the variants.
        resumed: those of which the points of resumptions are needed too.
        root: folder to work in.
        jobs: number of processes.
    """

    def work(job: int) -> int:
        launcher.adopt_orphans()
        for name in names[job::jobs]:
            known = reference(VARIANTS[name], root / name, with_resumptions=name in resumed)
            (root / f"{name}.pickle").write_bytes(pickle.dumps(known))
        return 0

    pids = [launcher.fork(lambda job=job: work(job)) for job in range(jobs)]  # type: ignore[misc]
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        raise RuntimeError("a run that nobody disturbs failed, or does not train: see above")
    return {name: pickle.loads((root / f"{name}.pickle").read_bytes()) for name in names}


def find_mutations(expected: Reference, root: Path) -> bool:
    """Return True if every mutation is found; prints what it was found by."""
    missed = 0
    for name, mutation in MUTATIONS.items():
        result = run_case(Case("plain", mutation.mode, mutation.point), expected, root, mutation.apply)
        found = result.reached and bool(result.problems)
        missed += not found
        print(f"{name:16}{'found' if found else 'MISSED'}  {'; '.join(result.problems)[:150]}", flush=True)
    return missed == 0


def all_cases(references: dict[str, Reference], modes: Sequence[str]) -> list[Case]:
    """Every point, in each way to die that makes a difference there."""
    cases = []
    for name, known in references.items():
        for point in known.points:
            cases += [Case(name, mode, point) for mode in modes if _differs(mode, point)]
        for first, points in known.resume_points.items():
            cases += [Case(name, "node", point, first) for point in points if "node" in modes]
    return cases


def _differs(mode: str, point: str) -> bool:
    if mode == "rank":  # only then other processes are at work that can go on
        return phase_of(point) in ("save", "manifest", "prune") or not point.startswith("r0")
    if mode == "power":
        return not any(kind in point for kind in ("| read ", "| suspended", "| resumed", "| mkdir "))
    return True


def chosen(references: dict[str, Reference], modes: Sequence[str]) -> list[Case]:
    """All cases in an order in which every beginning has all variants, modes and phases in it."""
    strata: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in all_cases(references, modes):
        strata[case.variant, case.mode, case.phase].append(case)
    # One stratum of each variant in turn: that of a phase and a mode that came least often so far.
    waiting = {name: [key for key in strata if key[0] == name] for name in references}
    times: Counter[str] = Counter()
    turns: dict[tuple[str, str, str], int] = {}
    while any(waiting.values()):
        for keys in filter(None, waiting.values()):
            key = min(keys, key=lambda key: (times[key[2]], times[key[1]]))
            keys.remove(key)
            times.update(key[1:])
            turns[key] = len(turns)
    ordered = []
    for key, members in strata.items():
        # The middle, the quarters, the eighths, ...
        places = sorted(range(len(members)), key=lambda i: (_depth(i + 1, len(members) + 1), i))
        ordered += [(rank > 0, rank / len(members), turns[key], members[place]) for rank, place in enumerate(places)]
    ordered.sort(key=lambda entry: entry[:3])
    return [case for *_, case in ordered]


def _depth(place: int, size: int) -> int:
    """Return how often an interval is halved until its middle is ``place``."""
    low, high, depth = 0, size, 0
    while (middle := (low + high) // 2) != place:
        low, high, depth = (low, middle, depth + 1) if place < middle else (middle, high, depth + 1)
    return depth


def run_all(
    cases: list[Case], references: dict[str, Reference], root: Path, jobs: int, deadline: float
) -> list[tuple[Case, Result]]:
    """All of them, in ``jobs`` processes that are forked from this one."""
    file = root / "results.jsonl"
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    workers = []
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _work(cases, job, jobs, references, root, deadline, handle)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        workers.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in workers]
    if any(codes):
        raise RuntimeError(f"the harness itself failed: {codes}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(cases[row["case"]], Result(row["reached"], row["problems"])) for row in rows]


def _work(
    cases: list[Case],
    job: int,
    jobs: int,
    references: dict[str, Reference],
    root: Path,
    deadline: float,
    handle: int,
) -> int:
    launcher.adopt_orphans()
    for number in range(job, len(cases), jobs):
        if time.monotonic() > deadline:
            return 0
        case = cases[number]
        result = run_case(case, references[case.variant], root / f"job{job}")
        line = json.dumps({"case": number, "reached": result.reached, "problems": result.problems})
        os.write(handle, f"{line}\n".encode())
        if result.problems:
            print(f"FAILED {case.command}\n    " + "\n    ".join(result.problems[:6]), flush=True)
    return 0


def report(results: list[tuple[Case, Result]]) -> int:
    """Print the table; the number of failed cases."""
    table: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for case, result in results:
        row = table[case.phase, case.mode]
        row[0] += result.reached
        row[1] += not result.reached
        row[2] += bool(result.problems)
    print(f"{'phase':14}{'mode':8}{'killed':>8}{'not reached':>14}{'failed':>8}")
    for (phase, mode), (killed, missed, failed) in sorted(table.items()):
        print(f"{phase:14}{mode:8}{killed:8}{missed:14}{failed:8}")
    sums = [sum(row[i] for row in table.values()) for i in range(3)]
    print(f"{'all':14}{'':8}{sums[0]:8}{sums[1]:14}{sums[2]:8}")
    return sums[2]


if __name__ == "__main__":
    sys.exit(main())
