"""Execution of an experiment: the search, the reported runs, and its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.commands.experiments.experiment import Experiment, choose
from megatron_dppo.commands.experiments.figures import format_results, write_page
from megatron_dppo.commands.experiments.grid import GridRun
from megatron_dppo.commands.experiments.row import ExternalRow, read_external_rows, relabel_row
from megatron_dppo.commands.experiments.runner import execute_runs
from megatron_dppo.commands.experiments.store import Rows, Store
from megatron_dppo.commands.experiments.verdicts import format_verdicts
from megatron_dppo.files import disk_errors, write_synced


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    output: str
    quick: bool = False
    jobs: int = 1
    seeds: Sequence[int] | None = None
    limit: int | None = None
    """Largest number of new runs. None executes all."""
    warmup_steps: int | None = None
    list_only: bool = False
    rows: Sequence[str] = ()
    """Files with rows of other machines."""


def execute(experiment: Experiment, request: Request) -> None:
    """Execute missing runs and write ``table.md``, ``figures.png`` and ``rows.jsonl`` to the experiment's folder.

    Raises:
        UserError: A run without a result, broken rows, or a locked folder.
    """
    store = Store(Path(request.output), request.warmup_steps)
    store.check_output_dir()
    external = [_Source(file, read_external_rows(Path(file))) for file in request.rows]
    if request.list_only:
        _list(store, experiment, request, external)
        return
    name = f"{experiment.name}{'-quick' if request.quick else ''}"
    with store.held(name):
        _execute_locked(store, experiment, request, external, store.folder / name)


@dataclass
class _Source:
    """File with rows of another machine."""

    file: str
    rows: Sequence[ExternalRow]
    num_imported: int = 0


def _execute_locked(
    store: Store, experiment: Experiment, request: Request, external: Sequence[_Source], folder: Path
) -> None:
    search = experiment.search(request.quick)
    store.add(_new_rows(store, search, external), search)
    before = len({run.key for run in search if store.has(run)})
    rows = _execute_runs(store, search, request, request.limit)
    report = experiment.report(request.quick, request.seeds, rows.values())
    store.add(_new_rows(store, report, external), report)
    for source in external:
        print(f"{source.num_imported} rows imported from {source.file}", flush=True)
    # The reported runs depend on the settings that the search chooses.
    is_search_done = all(run.refusal or run.key in rows for run in search)
    if is_search_done:
        # ``len(rows) - before`` runs of the search were new.
        left = None if request.limit is None else request.limit - len(rows) + before
        rows |= _execute_runs(store, report, request, left)
    _write(folder, experiment, [*search, *report], rows)


def _list(store: Store, experiment: Experiment, request: Request, external: Sequence[_Source]) -> None:
    """Print the missing runs. Write nothing."""
    search = experiment.search(request.quick)
    rows = store.read(search) | _new_rows(store, search, external)
    report = experiment.report(request.quick, request.seeds, rows.values())
    rows |= store.read(report) | _new_rows(store, report, external)
    for source in external:
        print(f"{source.num_imported} rows would be imported from {source.file}", flush=True)
    for run in (*search, *report):
        if not run.refusal and run.key not in rows:
            print(f"{run.key}  {run.phase:6}  {run.task}, {run.mismatch}, {run.loss}, seed {run.seed}")


def _new_rows(store: Store, runs: Sequence[GridRun], external: Sequence[_Source]) -> Rows:
    """Return the rows to import. Each counts for the first file that has it."""
    rows = Rows()
    for source in external:
        new = store.new_rows(source.rows, runs)
        source.num_imported += len(new.keys() - rows.keys())
        rows = new | rows
    return rows


def _execute_runs(store: Store, runs: Sequence[GridRun], request: Request, limit: int | None) -> Rows:
    return execute_runs(store, runs, request.jobs, lambda line: print(line, flush=True), limit)


def _write(folder: Path, experiment: Experiment, runs: Sequence[GridRun], by_key: Rows) -> None:
    rows = [relabel_row(by_key[run.key], run) for run in runs if run.key in by_key]
    reported = [run for run in runs if run.phase == "report"]
    chosen = "\n".join(
        f"- {task}, {loss}: {json.dumps(candidates[number])}"
        for (task, loss), (number, candidates) in choose(rows).items()
    )
    parts = [f"# {experiment.title}", format_results(rows, reported)]
    if experiment.claims:
        parts.append("## What holds and what does not\n\n" + format_verdicts(rows, experiment.claims))
    if chosen:
        parts.append("## Chosen on other seeds\n\n" + chosen)
    text = "\n\n".join(parts)
    with disk_errors(folder, "table and figures"):
        write_synced(folder / "table.md", text + "\n")
        write_synced(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_page(rows, folder / "figures.png", experiment.title)
    print(f"\n{text}\n\nwritten to {folder}: table.md, figures.png, rows.jsonl", flush=True)
