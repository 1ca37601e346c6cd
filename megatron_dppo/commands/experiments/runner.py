"""Do the runs of a grid that are not there yet, several at a time; whatever ends it, the next call goes on."""

from __future__ import annotations

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

from megatron_dppo.commands.experiments.child import COSTS, log_of, make_base, make_row
from megatron_dppo.commands.experiments.grid import GridRun
from megatron_dppo.commands.experiments.store import Rows, Store
from megatron_dppo.engines.local.perturbation import require_modelopt
from megatron_dppo.errors import UserError

PRELOAD = "megatron_dppo.run.preload"


@dataclass
class _Job:
    target: Callable[..., None]
    arguments: tuple[Any, ...]
    result: Path
    """is there when the job is done"""
    log: Path
    name: str
    needs: Path | None = None
    """is there when the job can begin"""

    @property
    def ready(self) -> bool:
        """Whether it can begin."""
        return self.needs is None or self.needs.is_dir()


def do_runs(
    store: Store, runs: Sequence[GridRun], jobs: int, say: Callable[[str], None], limit: int | None = None
) -> Rows:
    """The rows of all runs that are not refused, those that are missing made now.

    Args:
        store: where they are.
        runs: of a grid; runs of one key are one run.
        jobs: processes at a time.
        say: gets a line a run.
        limit: at most so many new runs.

    Raises:
        UserError: a run ended without a result, a package is missing, or a row that is there is broken.
    """
    wanted = {run.key: run for run in runs if not run.refusal}
    found = store.read(list(wanted.values()))  # before any work: a broken row would spoil the end of it
    missing = [run for key, run in wanted.items() if key not in found][:limit]
    store.make_folders()
    for key in found:  # a command may have been killed right after the row was written
        shutil.rmtree(store.place(wanted[key]), ignore_errors=True)
        log_of(store.place(wanted[key])).unlink(missing_ok=True)
    for form in {run.weights for run in missing} - {"none"}:
        require_modelopt(form)
    if missing:
        _do(_jobs(store, missing), jobs, say)
    return found | store.read(missing)


def make_base_at(store: Store, run: GridRun, target: Path, say: Callable[[str], None]) -> None:
    """Make the base model of a run at ``target``, wherever the store or the package has one.

    Raises:
        UserError: the warm-up ended without a result.
    """
    _do([_base_job(store, run, target)], 1, say)


def _jobs(store: Store, runs: Sequence[GridRun]) -> list[_Job]:
    """Each base model that is missing, and then the runs that start from it."""
    groups: dict[Path, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(store.base(run), []).append(run)
    jobs = []
    for base, group in groups.items():
        jobs += [] if base.is_dir() else [_base_job(store, group[0], base)]
        jobs += [_run_job(store, run) for run in group]
    return jobs


def _base_job(store: Store, run: GridRun, target: Path) -> _Job:
    name = f"base of {run.task}, seed {run.settings['run']['seed']}"
    return _Job(make_base, (run.task, store.warmup(run), str(target)), target, log_of(Path(f"{target}.partial")), name)


def _run_job(store: Store, run: GridRun) -> _Job:
    folder, row = store.place(run), store.row(run)
    name = f"{run.task}, {run.mismatch}, {run.loss}, seed {run.seed}"
    return _Job(
        make_row, (run, str(store.base(run)), str(folder), str(row)), row, log_of(folder), name, store.base(run)
    )


def _do(jobs: Sequence[_Job], at_once: int, say: Callable[[str], None]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    # The runs are small: a GPU would wait for its kernels. The server that they are forked from reads this.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # The server imports before a run has a log: Megatron's warnings about optional packages would be on the terminal.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    waiting, running, done = list(jobs), dict[Any, tuple[BaseProcess, _Job]](), 0
    try:
        while waiting or running:
            while len(running) < at_once and (job := next((job for job in waiting if job.ready), None)):
                waiting.remove(job)
                process = context.Process(target=job.target, args=job.arguments)
                process.start()
                running[process.sentinel] = process, job
            for sentinel in wait(list(running)):
                ended, job = running.pop(sentinel)
                ended.join()
                done += 1
                _check(ended, job)
                say(f"[{done}/{len(jobs)}] {job.name}{_outcome(job.result)}")
    finally:
        for left, _ in running.values():
            left.kill()
            left.join()


def _check(process: BaseProcess, job: _Job) -> None:
    if job.result.exists():
        job.log.unlink(missing_ok=True)
        return
    tail = job.log.read_text(encoding="utf-8", errors="replace")[-2000:] if job.log.is_file() else ""
    raise UserError(
        f"the run ({job.name}) ended with exit code {process.exitcode} and without a result; the same command goes on "
        f"with it. Its log {job.log} ends:\n{tail}"
    )


def _outcome(result: Path) -> str:
    file = result / COSTS if result.is_dir() else result
    row = json.loads(file.read_text(encoding="utf-8"))
    rewards = row.get("curves", {}).get("rollout/reward", [])
    last = f"  reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if rewards else ""
    stopped = f"  STOPPED {row['error'][:80]}" if row.get("error") else ""
    return f"{last}{stopped}  {row['cpu_seconds']:.0f} CPU s"
