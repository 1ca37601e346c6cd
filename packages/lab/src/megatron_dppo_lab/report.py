"""Execution of an experiment: the search, the reported runs, and its results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo_lab.experiment import Experiment
from megatron_dppo_lab.figures import format_results, format_search, write_page
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.paired import compare, format_columns, format_comparisons
from megatron_dppo_lab.row import ExternalRow, read_external_rows, relabel_row
from megatron_dppo_lab.runner import execute_runs
from megatron_dppo_lab.store import Rows, Store
from megatron_dppo_lab.verdicts import format_verdicts


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    output: str
    quick: bool = False
    jobs: int = 1
    seeds: Sequence[int] | None = None
    limit: int | None = None
    """Largest number of new runs. 0 only writes the results of finished ones. None executes all."""
    base_steps: int | None = None
    list_only: bool = False
    rows: Sequence[str] = ()
    """Files with rows of other machines."""


def execute(experiment: Experiment, request: Request) -> None:
    """Execute missing runs and write ``table.md``, ``figures.png`` and ``rows.jsonl`` to the experiment's folder."""
    store = Store(Path(request.output), request.base_steps)
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
    file: str
    rows: Sequence[ExternalRow]
    imported: set[str] = field(default_factory=set)
    """Keys of the rows that were taken over from this file."""


def _execute_locked(
    store: Store, experiment: Experiment, request: Request, external: Sequence[_Source], folder: Path
) -> None:
    rows = Rows()
    runs: list[GridRun] = []
    left = request.limit
    for stage in experiment.stages(request.quick):
        search = stage.search(request.quick)
        left = _execute_missing(store, search, request, external, rows, left)
        # The reported runs depend on the settings that the search chooses. A limit that ends it leaves nothing.
        report = stage.report(request.quick, request.seeds, rows.values())
        left = _execute_missing(store, report, request, external, rows, left)
        runs += [*search, *report]
    for source in external:
        print(f"{len(source.imported)} rows imported from {source.file}", flush=True)
    _write(folder, experiment, runs, rows)


def _execute_missing(
    store: Store, runs: Sequence[GridRun], request: Request, external: Sequence[_Source], rows: Rows, limit: int | None
) -> int | None:
    """Import or execute the missing runs, and add all of their rows to ``rows``. Return what is left of the limit."""
    store.add(_new_rows(store, runs, external), runs)
    num_before = len({run.key for run in runs if store.has(run)})
    done = execute_runs(store, runs, request.jobs, lambda line: print(line, flush=True), limit)
    rows |= done
    return None if limit is None else limit - len(done) + num_before


def _list(store: Store, experiment: Experiment, request: Request, external: Sequence[_Source]) -> None:
    """Print the missing runs. Write nothing."""
    rows = Rows()
    runs: dict[str, GridRun] = {}
    for stage in experiment.stages(request.quick):
        search = stage.search(request.quick)
        rows |= store.read(search) | _new_rows(store, search, external)
        report = stage.report(request.quick, request.seeds, rows.values())
        rows |= store.read(report) | _new_rows(store, report, external)
        for run in (*search, *report):
            runs.setdefault(run.key, run)
    for source in external:
        print(f"{len(source.imported)} rows would be imported from {source.file}", flush=True)
    for run in runs.values():
        if not run.refusal and run.key not in rows:
            print(f"{run.key}  {run.phase:6}  {run.task}, {run.mismatch}, {run.loss}, seed {run.seed}")


def _new_rows(store: Store, runs: Sequence[GridRun], external: Sequence[_Source]) -> Rows:
    """Return the rows to import. Each counts for the first file that has it."""
    rows = Rows()
    for source in external:
        new = store.new_rows(source.rows, runs)
        source.imported |= new.keys() - rows.keys()
        rows = new | rows
    return rows


def _write(folder: Path, experiment: Experiment, runs: Sequence[GridRun], by_key: Rows) -> None:
    rows = [relabel_row(by_key[run.key], run) for run in runs if run.key in by_key]
    reported = [run for run in runs if run.phase == "report"]
    parts = [f"# {experiment.title}", format_results(rows, reported, experiment.claims)]
    if experiment.has_paired_tests:
        comparisons = compare(experiment.claims, rows, runs)
        parts.append("## Verdicts\n\n" + format_comparisons(comparisons))
        parts.append("## Columns\n\n" + format_columns(rows, runs))
    elif experiment.claims:
        parts.append("## What holds and what does not\n\n" + format_verdicts(rows, experiment.claims))
    if chosen := format_search(rows):
        parts.append("## Chosen on other seeds\n\n" + chosen)
    text = "\n\n".join(parts)
    with disk_errors(folder, "table and figures"):
        write_synced(folder / "table.md", text + "\n")
        write_synced(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_page(rows, folder / "figures.png", experiment.title)
    print(f"\n{text}\n\nwritten to {folder}: table.md, figures.png, rows.jsonl", flush=True)
