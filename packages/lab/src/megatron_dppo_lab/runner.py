"""Concurrent execution of a grid's missing runs. After an interruption the next call resumes."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo_lab.child import COSTS, RunRecords, log_path, make_base, make_row
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.perturbation import QUANTIZATION_MODULE, require_modelopt
from megatron_dppo_lab.store import Rows, Store

PRELOAD = "megatron_dppo_lab.preload"


@dataclass
class _Job:
    target: Callable[..., None]
    arguments: tuple[Any, ...]
    result: Path
    """Path that exists when the job is done."""
    log: Path
    name: str
    needs: Path | None = None
    """Folder that must exist before the job starts. None for no dependency."""


def execute_runs(
    store: Store,
    runs: Sequence[GridRun],
    jobs: int,
    print_line: Callable[[str], None],
    limit: int | None = None,
    rollouts_every: int | None = None,
) -> Rows:
    """Return the rows of all valid runs. Execute the missing ones first.

    Runs with the same key are executed once, and at most ``limit`` new ones. ``rollouts_every`` keeps the records of
    each new run in ``Store.records``, with the rollouts of every n-th step, or of none with 0. None keeps no records.
    """
    by_key = {run.key: run for run in runs if not run.refusal}
    # Read all rows before any work, so that a broken one is reported at once.
    rows = store.read(list(by_key.values()))
    missing = [run for key, run in by_key.items() if key not in rows][:limit]
    if note := store.require_same_bases(rows, missing):
        print_line(f"note: {note}")
    store.make_folders()
    # A command may have been killed between writing the row and removing the work folder.
    for key in rows:
        shutil.rmtree(store.work_folder(by_key[key]), ignore_errors=True)
        log_path(store.work_folder(by_key[key])).unlink(missing_ok=True)
    for form in {run.weights for run in missing} - {"none"}:
        require_modelopt(form)
    if missing:
        quantized = any(run.weights != "none" for run in missing)
        execute_jobs(list_jobs(store, missing, rollouts_every), jobs, print_line, quantized=quantized)
    return rows | store.read(missing)


def make_base_at(store: Store, run: GridRun, target: Path, print_line: Callable[[str], None]) -> None:
    """Train the base model of a run into ``target``, even if the store or the package has one."""
    execute_jobs([_base_job(store, run, target)], 1, print_line)


def list_jobs(store: Store, runs: Sequence[GridRun], rollouts_every: int | None) -> list[_Job]:
    """Return a job for each missing base model, followed by the runs that start from it."""
    groups: dict[Path, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(store.base(run), []).append(run)
    jobs = []
    for base, group in groups.items():
        jobs += [] if base.is_dir() else [_base_job(store, group[0], base)]
        jobs += [_run_job(store, run, rollouts_every) for run in group]
    return jobs


def _base_job(store: Store, run: GridRun, target: Path) -> _Job:
    seed = run.settings["run"]["seed"]
    arguments = (run.task, seed, store.base_steps, str(target))
    return _Job(make_base, arguments, target, log_path(Path(f"{target}.partial")), f"base of {run.task}, seed {seed}")


def _run_job(store: Store, run: GridRun, rollouts_every: int | None) -> _Job:
    folder, row = store.work_folder(run), store.row(run)
    records = None if rollouts_every is None else RunRecords(str(store.records(run)), rollouts_every)
    name = f"{run.task}, {run.mismatch}, {run.loss}, seed {run.seed}"
    arguments = (run, str(store.base(run)), str(folder), str(row), records)
    return _Job(make_row, arguments, row, log_path(folder), name, store.base(run))


def execute_jobs(
    jobs: Sequence[_Job], at_once: int, print_line: Callable[[str], None], *, quantized: bool = False
) -> None:
    """Run the jobs, each in a process of its own, a number of them at once."""
    context = multiprocessing.get_context("forkserver")
    # nvidia-modelopt takes seconds to import, and imports Megatron, so it comes after the shims of PRELOAD.
    context.set_forkserver_preload([PRELOAD, QUANTIZATION_MODULE] if quantized else [PRELOAD])
    # The runs are too small for a GPU. The fork server reads these variables when it starts.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Tensors of megabytes come and go at each token. By default the kernel would clear their pages each time.
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    # The fork server imports before a run has a log: hide Megatron's warnings about optional packages.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    waiting = list(jobs)
    running: dict[Any, tuple[BaseProcess, _Job]] = {}
    done = 0
    try:
        while waiting or running:
            # A run waits for its base model, and others may start before it.
            while len(running) < at_once and (
                job := next((j for j in waiting if j.needs is None or j.needs.is_dir()), None)
            ):
                waiting.remove(job)
                process = context.Process(target=job.target, args=job.arguments)
                process.start()
                running[process.sentinel] = process, job
            for sentinel in wait(list(running)):
                finished, job = running.pop(sentinel)
                finished.join()
                done += 1
                _require_result(finished, job)
                print_line(f"[{done}/{len(jobs)}] {job.name}{_format_outcome(job.result)}")
    finally:
        for unfinished, _ in running.values():
            unfinished.kill()
            unfinished.join()


def _require_result(process: BaseProcess, job: _Job) -> None:
    if job.result.exists():
        job.log.unlink(missing_ok=True)
        return
    tail = job.log.read_text(encoding="utf-8", errors="replace")[-2000:] if job.log.is_file() else ""
    raise UserError(
        f"The run ({job.name}) exited with code {process.exitcode} and without a result. Fix: see its log {job.log}, "
        f"then rerun the command to resume. The log ends:\n{tail}"
    )


def _format_outcome(result: Path) -> str:
    file = result / COSTS if result.is_dir() else result
    row = json.loads(file.read_text(encoding="utf-8"))
    rewards = row.get("curves", {}).get("rollout/reward", [])
    last = f"  reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if rewards else ""
    stopped = f"  STOPPED {row['error'][:80]}" if row.get("error") else ""
    return f"{last}{stopped}  {row['cpu_seconds']:.0f} CPU s"
