"""Carry an experiment out: the search, the reported runs, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.commands.experiments.experiment import Experiment, choose
from megatron_dppo.commands.experiments.figures import as_table, write_page
from megatron_dppo.commands.experiments.grid import GridRun
from megatron_dppo.commands.experiments.row import Handed, labelled, read_handed
from megatron_dppo.commands.experiments.runner import do_runs
from megatron_dppo.commands.experiments.store import Rows, Store
from megatron_dppo.commands.experiments.verdicts import as_verdicts
from megatron_dppo.files import disk_errors, write_synced


@dataclass(frozen=True)
class Request:
    """What is asked for on the command line."""

    output: str
    quick: bool = False
    jobs: int = 1
    seeds: Sequence[int] | None = None
    limit: int | None = None
    """new runs; None = all"""
    warmup_steps: int | None = None
    list_only: bool = False
    rows: Sequence[str] = ()
    """files of rows that other machines made"""


def carry_out(experiment: Experiment, request: Request) -> None:
    """Do what is missing and write ``table.md``, ``figures.png`` and ``rows.jsonl`` to the experiment's folder.

    Raises:
        UserError: a run ended without a result, rows that are there or handed over are broken, or another command
            works in the folder.
    """
    store = Store(Path(request.output), request.warmup_steps)
    store.check_output_dir()
    handed = [_Source(file, read_handed(Path(file))) for file in request.rows]
    if request.list_only:
        _list(store, experiment, request, handed)
        return
    name = f"{experiment.name}{'-quick' if request.quick else ''}"
    with store.held(name):
        _carry_out(store, experiment, request, handed, store.folder / name)


@dataclass
class _Source:
    """A file of rows that another machine made."""

    file: str
    rows: Sequence[Handed]
    taken: int = 0


def _carry_out(store: Store, experiment: Experiment, request: Request, handed: Sequence[_Source], folder: Path) -> None:
    search = experiment.search(request.quick)
    store.add(_lacking(store, search, handed), search)
    before = len({run.key for run in search if store.has(run)})
    found = _do(store, search, request, request.limit)
    report = experiment.report(request.quick, request.seeds, found.values())
    store.add(_lacking(store, report, handed), report)
    for source in handed:
        print(f"{source.taken} rows taken from {source.file}", flush=True)
    whole = all(run.refusal or run.key in found for run in search)
    if whole:  # else the search is not over, and the reported runs are not known yet
        left = None if request.limit is None else request.limit - len(found) + before
        found |= _do(store, report, request, left)
    _write(folder, experiment, [*search, *report], found)


def _list(store: Store, experiment: Experiment, request: Request, handed: Sequence[_Source]) -> None:
    """Print what is missing; write nothing."""
    search = experiment.search(request.quick)
    found = store.read(search) | _lacking(store, search, handed)
    report = experiment.report(request.quick, request.seeds, found.values())
    found |= store.read(report) | _lacking(store, report, handed)
    for source in handed:
        print(f"{source.taken} rows would be taken from {source.file}", flush=True)
    for run in (*search, *report):
        if not run.refusal and run.key not in found:
            print(f"{run.key}  {run.phase:6}  {run.task}, {run.mismatch}, {run.loss}, seed {run.seed}")


def _lacking(store: Store, runs: Sequence[GridRun], handed: Sequence[_Source]) -> Rows:
    """The rows that the store takes over; each is counted with the first file that has it."""
    found = Rows()
    for source in handed:
        new = store.lacking(source.rows, runs)
        source.taken += len(new.keys() - found.keys())
        found = new | found
    return found


def _do(store: Store, runs: Sequence[GridRun], request: Request, limit: int | None) -> Rows:
    return do_runs(store, runs, request.jobs, lambda line: print(line, flush=True), limit)


def _write(folder: Path, experiment: Experiment, runs: Sequence[GridRun], found: Rows) -> None:
    rows = [labelled(found[run.key], run) for run in runs if run.key in found]
    reported = [run for run in runs if run.phase == "report"]
    chosen = "\n".join(
        f"- {task}, {loss}: {json.dumps(candidates[number])}"
        for (task, loss), (number, candidates) in choose(rows).items()
    )
    parts = [f"# {experiment.title}", as_table(rows, reported)]
    if experiment.claims:
        parts.append("## What holds and what does not\n\n" + as_verdicts(rows, experiment.claims))
    if chosen:
        parts.append("## Chosen on other seeds\n\n" + chosen)
    text = "\n\n".join(parts)
    with disk_errors(folder, "table and figures"):
        write_synced(folder / "table.md", text + "\n")
        write_synced(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_page(rows, folder / "figures.png", experiment.title)
    print(f"\n{text}\n\nwritten to {folder}: table.md, figures.png, rows.jsonl", flush=True)
