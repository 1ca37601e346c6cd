"""One run of an experiment in a forked process, which inherits all imports."""

import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.config.io import validate
from megatron_dppo.config.paths import resolve_paths
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.files import write_synced
from megatron_dppo.process.marker import MARKER
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.steps.files import FOLDER as ROLLOUTS
from megatron_dppo.setup.starts import CONFIG, STARTS
from megatron_dppo_lab.base_model import print_loss, read_base_inputs, train_base
from megatron_dppo_lab.catalogue import REAL_MIXTURE, base_settings, task_files
from megatron_dppo_lab.embedded_tasks import write_model_folder
from megatron_dppo_lab.grid import GridRun, Settings, merged
from megatron_dppo_lab.smollm2 import mixture_folder, model_folder
from megatron_dppo_lab.store import weights_digest

ROW_METRICS = (
    *("rollout/reward", "rollout/response_length", "eval/accuracy"),
    *("train/abs_prob_diff", "train/abs_prob_diff_first"),
    *("train/mask_fraction", "train/mask_fraction_positive", "train/mask_fraction_negative"),
    *("train/divergence", "train/ratio", "train/ratio_max", "train/prob_rise_max", "train/kl_k3", "train/entropy"),
    *("train/grad_norm", "train/skipped_updates"),
)
"""Metrics of each step that are stored in a row."""
COSTS = "costs.json"
"""File name of the costs in the folder of a base model."""
ROW_METRIC_PREFIX = "train/counterfactual"
_RECORDS = (MARKER, CONFIG, STARTS, "metrics.jsonl", "summary.json", ROLLOUTS)
"""Files and folders of a run that its report reads."""


class RunRecords(NamedTuple):
    """Records of a run that outlive its work folder."""

    folder: str
    """Folder that receives them. An existing one is replaced."""
    rollouts_every: int
    """Value of ``log.rollouts_every``. It changes no other result of the run."""


def make_base(task: str, seed: int, num_steps: int | None, target: str) -> None:
    """Train the base model of a task and create its folder ``target`` atomically.

    The folder of the real model holds links to its files.

    Args:
        task: Key of ``TASKS``.
        seed: Seed of initial weights and corpus.
        num_steps: Supervised steps. None uses the task's number.
        target: Folder to create.
    """
    folder = Path(f"{target}.partial")
    prepare_process(folder)
    start_time = time.perf_counter()
    made = folder / "base"
    if task_files(task) is not None:
        made.mkdir(parents=True)
        model = mixture_folder(print) if task == REAL_MIXTURE else model_folder(print)
        for file in model.iterdir():
            (made / file.name).symlink_to(file)
    else:
        write_model_folder(task, folder / "model")
        paths: Settings = {"model": {"path": str(folder / "model")}, "run": {"threads_per_rank": 1}}
        config = validate(merged(base_settings(f"task:{task}", seed, num_steps), paths), "base")
        train_base(config, read_base_inputs(config, world_size=1), made, print_loss)
    costs = {"cpu_seconds": _cpu_seconds(), "wall_seconds": time.perf_counter() - start_time}
    write_synced(made / COSTS, json.dumps(costs))
    made.replace(target)
    shutil.rmtree(folder)


def make_row(run: GridRun, base: str, folder: str, row: str, records: RunRecords | None = None) -> None:
    """Execute a run and write its row. A run that is stopped by a signal writes none.

    The work ``folder`` is removed at the end. Without ``records`` only the row is kept.
    """
    work_folder = Path(folder)
    prepare_process(work_folder)
    start_time = time.perf_counter()
    run_values: dict[str, Any] = {"model": {"path": base}}
    if records is not None:
        run_values["log"] = {"rollouts_every": records.rollouts_every}
    config, error = train_run(run.task, run.settings, work_folder / "run", run_values)
    curves = read_curves(work_folder / "run" / "metrics.jsonl")
    steps = curves.get("rollout/reward", [])
    if not error and len(steps) < config.run.num_steps:
        raise RuntimeError(f"the run ended after {len(steps)} of {config.run.num_steps} steps")
    values = {
        "key": run.key,
        "task": run.task,
        "loss": run.loss,
        "mismatch": run.mismatch,
        "seed": run.seed,
        "phase": run.phase,
        "candidate": run.candidate,
        "settings": run.settings,
        "error": error,
        "curves": curves,
        "base": Path(base).name,
        "base_weights": weights_digest(Path(base)),
        "cpu_seconds": _cpu_seconds(),
        "wall_seconds": time.perf_counter() - start_time,
    }
    # The row says that the run is done, so the records come first.
    if records is not None:
        _move_records(work_folder / "run", Path(records.folder))
    write_synced(Path(row), json.dumps(values) + "\n")
    shutil.rmtree(work_folder)


def _move_records(run_folder: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _RECORDS:
        if (run_folder / name).exists():
            (run_folder / name).replace(target / name)


def log_path(folder: Path) -> Path:
    """Return the log file of a run with the work folder ``folder``."""
    return folder.with_name(folder.name + ".log")


def read_curves(metrics: Path) -> dict[str, list[float | None]]:
    """Return the stored metrics over the steps. An evaluation before training comes first."""
    records = read_metrics(metrics)
    names = [n for n in {n for r in records for n in r} if n in ROW_METRICS or n.startswith(ROW_METRIC_PREFIX)]
    return {name: [record[name] for record in records if record.get(name) is not None] for name in sorted(names)}


def train_run(task: str, settings: Settings, folder: Path, paths: Mapping[str, Any]) -> tuple[Config, str]:
    """Run the trainer. Return the configuration and the error that stopped the run, usually empty."""
    from megatron_dppo.run.loop import run as train

    values = merged(settings, {"run": {"output_dir": str(folder)}}, paths)
    if (files := task_files(task)) is not None:
        resolve_paths(values, files)
    config = validate(values, "experiment")
    try:
        train(config)
    except TrainingStopped as error:
        # A result of the settings, such as gradients that are not finite. The same run would stop again.
        traceback.print_exc()
        return config, f"{type(error).__name__}: {error}"
    return config, ""


def prepare_process(folder: Path) -> None:
    """Create an empty work folder, redirect output to its log, and exit with the command."""
    # The garbage collector need not look at what the fork server imported: each full collection would take a third of a
    # second, and copy the pages that the processes share.
    gc.freeze()
    threading.Thread(target=_exit_with_command, name="command", daemon=True).start()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # File descriptors, because libraries in C++ print past ``sys.stdout``.
    log = os.open(log_path(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _exit_with_command() -> None:
    """Kill this process when the command exits: the fork server stays alive and sends no signal."""
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
