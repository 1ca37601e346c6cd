"""One run in a process of its own, forked from one that has imported everything."""

from __future__ import annotations

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
from typing import Any

from megatron_dppo.commands.experiments.catalogue import REAL_MODEL, task_files
from megatron_dppo.commands.experiments.grid import GridRun, Settings, merged
from megatron_dppo.commands.experiments.smollm2 import model_folder
from megatron_dppo.config.io import validate
from megatron_dppo.config.paths import resolve_paths
from megatron_dppo.config.schema import Config
from megatron_dppo.data.tasks import write_model_folder
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.files import write_synced
from megatron_dppo.report.records import read_metrics

KEPT = (
    "rollout/reward",
    "rollout/response_length",
    "eval/accuracy",
    "train/abs_prob_diff",
    "train/abs_prob_diff_first",
    "train/mask_fraction",
    "train/mask_fraction_positive",
    "train/mask_fraction_negative",
    "train/divergence",
    "train/ratio",
    "train/ratio_max",
    "train/prob_rise_max",
    "train/kl_k3",
    "train/entropy",
    "train/grad_norm",
    "train/skipped_updates",
)
"""Metrics of each step that a row has."""
COSTS = "costs.json"
"""in the folder of a base model"""
KEPT_PREFIX = "train/counterfactual"


def make_base(task: str, settings: Settings, target: str) -> None:
    """Warm the base model of a task up and put its folder at ``target``, whole or not at all.

    The folder of the real model has links to its files.
    """
    folder = Path(f"{target}.partial")
    _begin(folder)
    began = time.perf_counter()
    made = folder / "run" / "base"
    if task == REAL_MODEL:
        made.mkdir(parents=True)
        for file in model_folder(print).iterdir():
            (made / file.name).symlink_to(file)
    else:
        write_model_folder(task, folder / "model")
        _train(task, settings, folder / "run", {"model": {"path": str(folder / "model")}})
    costs = {"cpu_seconds": _cpu_seconds(), "wall_seconds": time.perf_counter() - began}
    write_synced(made / COSTS, json.dumps(costs))
    made.replace(target)
    shutil.rmtree(folder)


def make_row(run: GridRun, base: str, folder: str, row: str) -> None:
    """Do a run and write its row; a run that was stopped by a signal leaves none."""
    place = Path(folder)
    _begin(place)
    began = time.perf_counter()
    config, error = _train(run.task, run.settings, place / "run", {"model": {"path": base}})
    curves = read_curves(place / "run" / "metrics.jsonl")
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
        "cpu_seconds": _cpu_seconds(),
        "wall_seconds": time.perf_counter() - began,
    }
    write_synced(Path(row), json.dumps(values) + "\n")
    shutil.rmtree(place)


def log_of(folder: Path) -> Path:
    """What a run that works in ``folder`` prints."""
    return folder.with_name(folder.name + ".log")


def read_curves(metrics: Path) -> dict[str, list[float | None]]:
    """The kept metrics over the steps; those of an evaluation before training come first."""
    records = read_metrics(metrics)
    names = [n for n in {n for r in records for n in r} if n in KEPT or n.startswith(KEPT_PREFIX)]
    return {name: [record[name] for record in records if record.get(name) is not None] for name in sorted(names)}


def _train(task: str, settings: Settings, folder: Path, places: Mapping[str, Any]) -> tuple[Config, str]:
    """Run the trainer; returns the configuration and what a run that is told to stop says, mostly nothing."""
    from megatron_dppo.run.loop import run as train

    values = merged(settings, {"run": {"output_dir": str(folder)}}, places)
    if (files := task_files(task)) is not None:
        resolve_paths(values, files)
    config = validate(values, "experiment")
    try:
        train(config)
    except TrainingStopped as error:
        # A result of the settings, such as gradients that are not finite: the same run would end so again.
        traceback.print_exc()
        return config, f"{type(error).__name__}: {error}"
    return config, ""


def _begin(folder: Path) -> None:
    """An empty folder, a log beside it, and no life after the command's."""
    threading.Thread(target=_end_with_the_command, name="command", daemon=True).start()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = os.open(log_of(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _end_with_the_command() -> None:
    """The server that this process is forked from lives on while one of its children does: it tells nothing."""
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
