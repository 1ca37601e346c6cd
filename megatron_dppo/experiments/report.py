"""Carry an experiment out: the search, the reported runs, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.experiments.experiment import Experiment, choose
from megatron_dppo.experiments.figures import write_page
from megatron_dppo.experiments.grid import Run
from megatron_dppo.experiments.runner import Rows, Store, do_runs
from megatron_dppo.experiments.table import as_table, notes
from megatron_dppo.experiments.token_report import token_tables, write_token_page
from megatron_dppo.experiments.verdicts import as_verdicts
from megatron_dppo.files.atomic import write_synced


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
        UserError: a run ended without a result.
    """
    store = Store(Path(request.output), request.warmup_steps)
    search = experiment.search(request.quick)
    _take(store, search, request)
    before = len(store.read(search))
    found = _do(store, search, request, request.limit)
    report = experiment.report(request.quick, request.seeds, found.values())
    _take(store, report, request)
    if request.list_only:
        for run in (*search, *report):
            if not run.refusal and not store.row(run).is_file():
                print(f"{run.key}  {run.phase:6}  {run.task}, {run.mismatch}, {run.loss}, seed {run.seed}")
        return
    whole = all(run.refusal or run.key in found for run in search)
    if whole:  # else the search is not over, and the reported runs are not known yet
        left = None if request.limit is None else request.limit - len(found) + before
        found |= _do(store, report, request, left)
    folder = store.folder / f"{experiment.name}{'-quick' if request.quick else ''}"
    _write(folder, experiment, [*search, *report], found)


def _take(store: Store, runs: Sequence[Run], request: Request) -> None:
    for file in request.rows:
        print(f"{store.take(Path(file), runs)} rows taken from {file}", flush=True)


def _do(store: Store, runs: Sequence[Run], request: Request, limit: int | None) -> Rows:
    if request.list_only:
        return store.read(runs)
    return do_runs(store, runs, request.jobs, lambda line: print(line, flush=True), limit)


def _write(folder: Path, experiment: Experiment, runs: Sequence[Run], found: Rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A row says of what phase it was made; a run may stand in a search and in a report.
    rows = [{**found[run.key], "phase": run.phase, "loss": run.loss} for run in runs if run.key in found]
    reported = [run for run in runs if run.phase == "report"]
    chosen = "\n".join(
        f"- {task}, {loss}: {json.dumps(candidates[number])}"
        for (task, loss), (number, candidates) in choose(rows).items()
    )
    parts = [f"# {experiment.title}"]
    if experiment.tokens:
        parts += [token_tables(rows), notes(rows, reported)]
    else:
        parts.append(as_table(rows, reported))
    if experiment.claims:
        parts.append("## What holds and what does not\n\n" + as_verdicts(rows, experiment.claims))
    if chosen:
        parts.append("## Chosen on other seeds\n\n" + chosen)
    text = "\n\n".join(parts)
    write_synced(folder / "table.md", text + "\n")
    write_synced(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write = write_token_page if experiment.tokens else write_page
    write(rows, folder / "figures.png", experiment.title)
    print(f"\n{text}\n\nwritten to {folder}: table.md, figures.png, rows.jsonl", flush=True)
