"""Where the seconds of a training step go: tokens a second and core, and the share of each part.

    python benchmarks/train_step.py RUN_FOLDER [--skip 5] [--cores 2]

Reads the ``perf/`` records that any run writes (``make example`` writes them to runs/example). Prints shares of one run
and writes ``train_step.json`` beside the records; the loop's own overhead is everything but rollout, reward, Megatron,
weight publishing and waiting for other ranks. Exit code 1 when it is above 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_dppo.report.metrics import read_metrics

PARTS = ("rollout", "reward", "waiting", "forward_backward", "optimizer", "publish", "overhead")
MAX_OVERHEAD = 0.10


def summarize(folder: Path, skip: int, cores: int) -> dict[str, float]:
    """Shares of the step time on rank 0, and tokens a second and core, without the first ``skip`` steps."""
    steps = [r for r in read_metrics(folder / "metrics.jsonl") if "perf/step_seconds" in r][skip:]
    if not steps:
        raise SystemExit(f"{folder / 'metrics.jsonl'} has no steps after the first {skip}")
    total = sum(r["perf/step_seconds"] for r in steps)
    shares = {part: sum(r.get(f"perf/{part}_seconds", 0.0) for r in steps) / total for part in PARTS}
    tokens = sum(r["perf/tokens"] for r in steps)
    return {"steps": len(steps), "tokens_per_second_and_core": tokens / total / cores, **shares}


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    result = summarize(options.run_folder, options.skip, options.cores)
    print(f"{result['steps']:.0f} steps, {result['tokens_per_second_and_core']:,.0f} tokens a second and core")
    for part in PARTS:
        print(f"  {part:<18}{result[part]:>7.1%}")
    (options.run_folder / "train_step.json").write_text(json.dumps(result, indent=2) + "\n")
    if result["overhead"] > MAX_OVERHEAD:
        print(f"the loop's own overhead is above {MAX_OVERHEAD:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
