"""Router replay on a real mixture of experts: three engines in bf16, experts compared and replayed.

    python benchmarks/real_model_replay.py [--seeds 0 1] [--only sglang] [--output runs/real_model_replay]

Each run is three steps of examples/smollm2/moe.toml with 32 responses a step on two processes with expert parallelism
2, with the local engine, SGLang or vLLM on the CPU. Printed are means over the seeds: mean |pi - mu| before the first
update, the KL estimate of the first step, layers of tokens in which the routers of trainer and engine disagree, seconds
of a weight sync with its proof. Runs that are there are not done again. Needs 20 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.commands.example_run import RUNNABLE

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"sglang": ("sglang.sh", "0.5.23"), "vllm": ("vllm.sh", "0.32.0")}
COMMON = {
    "run.num_steps": 3,
    "rollout.dtype": "bf16",
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 4,
    "train.micro_batch_tokens": 1024,
    "eval.every": 0,
    "checkpoint.export_hf": False,
    "log.tensorboard": False,
}
OWN = {
    "sglang": {
        "rollout.sglang.context-length": 256,
        "rollout.sglang.max-running-requests": 64,
        "rollout.sglang.log-level": "warning",
    },
    "vllm": {"rollout.vllm.max-model-len": 256, "rollout.vllm.max-num-seqs": 64},
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "local, compared": ("local", {"train.router_replay": "compare"}),
    "local, replayed": ("local", {"train.router_replay": "rollout"}),
    "local, with weights": ("local", {"train.router_replay": "rollout", "train.router_replay_weights": True}),
    "sglang, compared": ("sglang", {"train.router_replay": "compare"}),
    "sglang, replayed": ("sglang", {"train.router_replay": "rollout"}),
    "vllm": ("vllm", {"train.router_replay": "off"}),
}
"""vLLM reports no experts on a CPU."""
COLUMNS = {
    "mean abs(pi - mu)": "train/abs_prob_diff_first",
    "KL": "train/kl_k3",
    "experts differ": "train/router_disagreement",
    "live routers differ": "train/router_live_disagreement",
    "sync and proof, s": "perf/publish_seconds",
}


def settings_of(variant: str) -> dict[str, Any]:
    """Return the settings of a variant over those of the example."""
    engine, own = VARIANTS[variant]
    settings = {**COMMON, **own}
    if engine in ENGINES:
        script, version = ENGINES[engine]
        settings |= {
            "rollout.engine": engine,
            "rollout.servers.command": [str(ROOT / "tools/engines" / script), "serve", version],
            "rollout.weight_sync.method": "distributed",
            **OWN[engine],
        }
    return settings


def run(variant: str, seed: int, model: Path, output: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps; does it unless it is there."""
    folder = output / f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (folder / "summary.json").is_file():
        output.mkdir(parents=True, exist_ok=True)
        settings = {**settings_of(variant), "run.seed": seed, "run.output_dir": str(folder), "model.path": str(model)}
        overrides = [part for key, value in settings.items() for part in (f"--{key}", _text(value))]
        command = [str(ROOT / "launch/torchrun.sh"), str(ROOT / "examples/smollm2/moe.toml"), "--nproc-per-node", "2"]
        environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with folder.with_suffix(".log").open("w") as log:
            code = subprocess.run(
                [*command, *overrides], env=environment, stdout=log, stderr=log, timeout=900
            ).returncode
        if code:
            print(f"{variant}, seed {seed}: exit code {code}, see {log.name}", flush=True)
            return []
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "rollout/reward" in record]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def row(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the cells of a variant: the first step of each run; of syncs the last step, as the first one connects."""
    cells = []
    for metric in COLUMNS.values():
        steps = [records[-1 if metric.startswith("perf/") else 0] for records in runs if records]
        values = [step[metric] for step in steps if metric in step]
        cells.append(f"{statistics.fmean(values):.3g}" if values else "-")
    return cells


def main() -> None:
    """Do the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="variants that begin so")
    parser.add_argument("--output", type=Path, default=Path("runs/real_model_replay"))
    options = parser.parse_args()
    model = RUNNABLE["smollm2-moe"].make_model()
    print("| engine | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1), flush=True)
    for variant in VARIANTS:
        if variant.startswith(options.only):
            runs = [run(variant, seed, model, options.output.resolve()) for seed in options.seeds]
            print(f"| {variant} | " + " | ".join(row(runs)) + " |", flush=True)


if __name__ == "__main__":
    main()
