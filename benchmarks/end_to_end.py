"""CPU seconds from one base model to a goal: megatron_dppo against TRL's GRPOTrainer.

    python benchmarks/end_to_end.py --seeds 0 1 2 [--base FOLDER ...] [--trl-python PATH] [--rows same best]
    python benchmarks/end_to_end.py --task smollm2 --repeats 1 --seeds 100 --rows 1e-5 3e-5 6e-5    # the search
    python benchmarks/end_to_end.py --task smollm2 --repeats 1 --seeds 0 1 --rows 3e-5

Both get the same base, prompts in the same order, reward function, samples and updates a rollout. The task chain_sum,
a tiny warmed-up model, has arrived when the mean training reward of its last three rollouts is at least 0.9; smollm2, a
pretrained language model, at the first evaluation with a held-out accuracy of at least 0.8 (both sides evaluate after
every second rollout, which is counted). Counted are the user and system seconds of all
processes of a run from its first rollout on; "with start-up" adds imports and model building. A run is deterministic,
but its CPU time grows with the load of the machine: the sides take turns, and the least of --repeats runs counts.

Without --base, a base is made for each seed (about a minute each). Without --trl-python, TRL gets an environment
of its own below ~/.cache/megatron_dppo. Figures of one machine, of one run: docs/results/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_meter import Reading, run_metered

from megatron_dppo.config.io import load_config
from megatron_dppo.setup.inputs import read_inputs
from megatron_dppo.types import Prompt
from megatron_dppo_lab.smollm2 import model_folder

ROOT = Path(__file__).resolve().parents[1]
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0")
_BF16 = {"bf16": True}
"""TRL's usual mixed precision: fp32 weights, bf16 products. Ours: bf16 weights, fp32 in the optimizer."""


@dataclass(frozen=True)
class Row:
    """One comparison: settings of each side beyond the common task."""

    ours: tuple[str, ...] = ()
    """Overrides of the task's configuration (megatron_dppo)."""
    grpo: dict[str, Any] = field(default_factory=dict)
    """Fields of TRL's GRPOConfig."""
    trl_model: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of transformers' ``from_pretrained`` in TRL."""


@dataclass(frozen=True)
class Task:
    """Task, reward and goal that both sides share."""

    config: Path
    """Configuration file of megatron_dppo."""
    reward: str
    """Reward function as ``module:function``, in TRL's signature."""
    metric: str
    """Key in metrics.jsonl of megatron_dppo."""
    trl_metric: str
    """Key in the lines that trl_side.py writes."""
    target: float
    window: int
    """Number of latest metric values whose mean has to reach the target."""
    rows: Mapping[str, Row]

    def arrived(self, readings: Sequence[Reading]) -> bool:
        """Return whether the last values of the metric have reached the target."""
        values = [r.reward for r in readings if r.reward is not None and r.step > 0]
        return len(values) >= self.window and statistics.fmean(values[-self.window :]) >= self.target


def _at_rate(rate: str) -> Row:
    return Row(ours=("--optimizer.lr", rate), grpo={"learning_rate": float(rate), **_BF16})


TASKS = {
    "chain_sum": Task(
        config=ROOT / "benchmarks" / "end_to_end.toml",
        reward="exact_reward:exact",
        metric="rollout/reward",
        trl_metric="reward",
        target=0.9,
        window=3,
        rows={
            "same": Row(grpo={"learning_rate": 3e-4}),
            "best": Row(ours=("--optimizer.lr", "6e-4"), grpo={"learning_rate": 6e-4}),
        },
    ),
    "smollm2": Task(
        config=ROOT / "benchmarks" / "end_to_end_smollm2.toml",
        reward="last_number_reward:last_number",
        metric="eval/accuracy",
        trl_metric="accuracy",
        target=0.8,
        window=1,
        rows={rate: _at_rate(rate) for rate in ("1e-5", "3e-5", "6e-5")},
    ),
}
"""Rows of chain_sum: ``same``: the example's learning rate. ``best``: for each side the best of 3e-4, 6e-4, 1e-3 (the
same one; at 1e-3 both sides fail on seed 1). Rows of smollm2 are learning rates of both sides."""


def summarize(task: Task, readings: Sequence[Reading]) -> dict[str, Any]:
    """Return rollouts and CPU seconds of one run; ``reached`` is True if it reached the target."""
    start, end = readings[0], readings[-1]
    return {
        "reached": task.arrived(readings),
        "rollouts": end.step,
        "cpu_seconds": round(end.cpu_seconds - start.cpu_seconds, 2),
        "cpu_seconds_with_startup": round(end.cpu_seconds, 2),
        "wall_seconds": round(end.wall_seconds - start.wall_seconds, 2),
        "readings": [r.as_dict() for r in readings],
    }


def environment(threads: int) -> dict[str, str]:
    """Return the environment of both sides: quiet, a fixed number of threads, this checkout importable."""
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "OMP_NUM_THREADS": str(threads)}


def our_command(config: Path, processes: int, overrides: Sequence[str]) -> list[str]:
    """Return the command of a run of megatron_dppo."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "-m", "megatron_dppo.train", str(config), *overrides]


def make_base(task: str, folder: Path, seed: int) -> Path:
    """Return the base model: made once for each seed (chain_sum), or the pretrained one (smollm2)."""
    if task == "smollm2":
        return model_folder(print)
    base = folder / f"base-{seed}"
    if not base.is_dir():
        print(f"making the base of seed {seed} (about a minute)", flush=True)
        command = [sys.executable, "-m", "megatron_dppo.commands.main", "base", "task:chain_sum", str(base)]
        command += ["--seed", str(seed), "--processes", "2", "--parallel.expert_model_parallel_size", "2"]
        subprocess.run(command, env=environment(1), stdout=subprocess.DEVNULL, check=True)
    return base


def make_trl_python() -> Path:
    """Return the Python of an environment with pinned TRL, created once."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_dppo" / "-".join(TRL_PACKAGES)
    python = home / "bin" / "python"
    if not (home / "complete").is_file():
        print(f"installing {', '.join(TRL_PACKAGES)} into {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *TRL_PACKAGES], check=True)
        (home / "complete").touch()
    return python


def run_ours(row: Row, base: Path, seed: int, folder: Path, options: argparse.Namespace) -> list[Reading]:
    """Run megatron_dppo once, metered."""
    task = TASKS[options.task]
    chosen = {"model.path": base, "run.seed": seed, "run.num_steps": options.max_rollouts, "run.output_dir": folder}
    overrides = [x for key, value in chosen.items() for x in (f"--{key}", str(value))]
    overrides += [*row.ours, *shlex.split(options.ours)]
    return run_metered(
        our_command(task.config, options.processes, overrides),
        environment(options.threads),
        folder / "metrics.jsonl",
        folder.with_suffix(".log"),
        task.metric,
        task.arrived,
    )


def run_trl(row: Row, base: Path, seed: int, folder: Path, options: argparse.Namespace) -> list[Reading]:
    """Run TRL once, metered, with the prompt stream of megatron_dppo."""
    task = TASKS[options.task]
    config = load_config(str(task.config), ["--model.path", str(base), "--run.seed", str(seed), *row.ours])
    inputs, count = read_inputs(config, 1), config.rollout.prompts_per_step * options.max_rollouts
    prompts = [_example(inputs.train_prompts[i]) for i in range(count)]
    held_out = [_example(each[i]) for each in inputs.eval_prompts.values() for i in range(len(each))]
    metrics = folder / "metrics.jsonl"
    settings = {
        "base": str(base),
        "output": str(folder / "trainer"),
        "metrics": str(metrics),
        "seed": seed,
        "threads": options.threads,
        "num_steps": options.max_rollouts,
        "updates_per_rollout": config.train.mini_batches * config.train.epochs,
        "prompts_per_step": config.rollout.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "max_new_tokens": config.rollout.max_new_tokens,
        "prompts": prompts,
        "held_out": held_out if task.metric == "eval/accuracy" else [],
        "eval_every": config.eval.every,
        "reward": task.reward,
        "grpo": {**row.grpo, **json.loads(options.grpo)},
        "model": {**row.trl_model, **json.loads(options.trl_model)},
    }
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [str(options.trl_python), str(ROOT / "benchmarks" / "trl_side.py"), str(folder / "settings.json")]
    log = folder.with_suffix(".log")
    return run_metered(command, environment(options.threads), metrics, log, task.trl_metric, task.arrived)


def _example(prompt: Prompt) -> dict[str, str]:
    return {"prompt": prompt.text, "label": str(prompt.label)}


def compare(name: str, bases: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Compare both sides on every seed, print the table of one row, and return the results."""
    task = TASKS[options.task]
    print(f"\n{name}: CPU seconds to {task.metric} {task.target} (rollouts; with start-up in brackets)")
    print(f"{'seed':>6}{'megatron_dppo':>26}{'TRL':>26}{'ratio':>8}{'with start-up':>15}", flush=True)
    sides = {"ours": run_ours, "trl": run_trl}
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed, base in zip(options.seeds, bases, strict=True):
        tries: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
        for _ in range(options.repeats):
            for side in options.sides:
                folder = options.output / name / f"{side}-{seed}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(parents=True, exist_ok=True)
                readings = sides[side](task.rows[name], base, seed, folder, options)
                tries[side].append(summarize(task, readings))
        for side, runs in tries.items():
            best = min(runs, key=lambda run: run["cpu_seconds"])
            results[side].append({"seed": seed, **best, "all_cpu_seconds": [run["cpu_seconds"] for run in runs]})
        print(
            f"{seed:>6}{_cell(results['ours'])}{_cell(results['trl'])}{_ratios(results, slice(-1, None))}", flush=True
        )
    print(f"{'median':>6}{'':>52}{_ratios(results, slice(None))}")
    return results


def _cell(results: list[dict[str, Any]]) -> str:
    if not results:
        return f"{'':>26}"
    r = results[-1]
    mark = "" if r["reached"] else " not reached"
    return f"{r['cpu_seconds']:.1f} ({r['rollouts']}) [{r['cpu_seconds_with_startup']:.1f}]{mark}".rjust(26)


def _ratios(results: dict[str, list[dict[str, Any]]], part: slice) -> str:
    """Return the median of the paired ratios ours / TRL, without and with start-up."""
    pairs = list(zip(results["ours"][part], results["trl"][part], strict=False))
    keys = ("cpu_seconds", "cpu_seconds_with_startup")
    medians = [statistics.median(a[key] / b[key] for a, b in pairs) for key in keys] if pairs else []
    return "".join(f"{m:>{w}.2f}" for m, w in zip(medians, (8, 15), strict=False))


def main() -> None:
    """Print the tables and write ``end_to_end.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base", type=Path, nargs="+", help="base folders, one a seed, instead of warming up")
    parser.add_argument("--task", choices=TASKS, default="chain_sum")
    parser.add_argument("--rows", nargs="+", help="of the task; default: all")
    parser.add_argument("--sides", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--trl-python", type=Path, help="an interpreter with TRL; None = make an environment")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "end_to_end")
    parser.add_argument("--processes", type=int, default=1, help="ours: processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process, on both sides")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each pair; the one with the least CPU time counts"
    )
    parser.add_argument("--max-rollouts", type=int, default=100)
    parser.add_argument("--ours", default="", help="further overrides of end_to_end.toml")
    parser.add_argument("--grpo", default="{}", help="further fields of GRPOConfig, JSON")
    parser.add_argument("--trl-model", default="{}", help="further arguments of from_pretrained in TRL, JSON")
    options = parser.parse_args()
    if options.base and len(options.base) != len(options.seeds):
        parser.error(f"--base names {len(options.base)} folders for {len(options.seeds)} seeds; give one for each")
    rows = TASKS[options.task].rows
    options.rows = options.rows or list(rows)
    if unknown := set(options.rows) - set(rows):
        parser.error(f"--rows {min(unknown)}: expected some of {', '.join(rows)}")
    options.output = options.output.resolve()
    if "trl" in options.sides and options.trl_python is None:
        options.trl_python = make_trl_python()
    bases = [
        b.resolve() for b in options.base or [make_base(options.task, options.output, seed) for seed in options.seeds]
    ]
    results = {name: compare(name, bases, options) for name in options.rows}
    target = options.output / "end_to_end.json"
    target.write_text(json.dumps({"rows": results, "options": vars(options)}, default=str, indent=1) + "\n")
    print(f"\nwritten {target}")


if __name__ == "__main__":
    main()
