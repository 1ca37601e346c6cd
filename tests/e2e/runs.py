"""Start real training runs as a user does, and read what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.forked import kill_forked_when, train_forked
from tests.metrics_page import undocumented

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/chain_sum/dppo.toml"
BASE_MODEL = CONFIG.parent / "model"


def command(arguments: list[str], processes: int, config: Path = CONFIG) -> list[str]:
    """The command line of a run: torchrun for several processes, plain Python for one."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*launcher, "megatron_dppo.train", str(config), *arguments]


def environment(extra_path: Path | None = None) -> dict[str, str]:
    """This process's environment without any rank, with an importable folder for reward functions."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    given = env.get("PYTHONPATH")  # the wheels of tests/gpu/run_all.sh
    paths = [str(ROOT), *([str(extra_path)] if extra_path else []), *([given] if given else [])]
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def train(
    arguments: list[str],
    processes: int = 1,
    config: Path = CONFIG,
    extra_path: Path | None = None,
    torchrun: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run to the end and capture the output.

    ``torchrun``: by the launcher, or by plain Python for one process, as a user starts it; else forked from a process
    that has imported everything, which is the same but for that.
    """
    if not torchrun:
        return train_forked([str(config), *arguments], environment(extra_path), processes, timeout=600)
    return subprocess.run(
        command(arguments, processes, config),
        env=environment(extra_path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def kill_when_exists(path: Path, arguments: list[str]) -> None:
    """Start a run of the example on two ranks, and kill it as soon as the path exists."""
    kill_forked_when(path.exists, [str(CONFIG), *arguments], environment(), 2, timeout=180)


def flags(**values: Any) -> list[str]:
    """``flags(run__num_steps=3)`` -> ``["--run.num_steps", "3"]``."""
    return [part for key, value in values.items() for part in (f"--{key.replace('__', '.')}", str(value))]


def from_base(base_model: Path, **more: Any) -> list[str]:
    """``flags`` of a run from the base model."""
    return flags(model__path=base_model, **more)


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; each number of them has to be on the page of metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    unknown = undocumented({name for line in lines for name in line})
    assert not unknown, f"docs/metrics.md has no row for {unknown}"
    return lines


def step_records(folder: Path) -> list[dict[str, Any]]:
    """Those of steps that trained; an evaluation beside training has a line of its own."""
    return [record for record in records(folder) if "rollout/reward" in record]


def without_timings(folder: Path) -> list[dict[str, Any]]:
    """The same, without what depends on the clock."""
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in records(folder)]
