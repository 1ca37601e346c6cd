"""A short run of the example whose every bit is known: what it gives, and on which machines that is the same.

The code paths that depend on the processor are pinned: one thread, torch's and oneDNN's oldest kernels, MKL's
compatible mode, the C library without its FMA variants. What is left (versions, the processor's make) is the ``key``.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.e2e.runs import command, environment, flags, from_base, records
from tests.reference_run import assert_trains

GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"
STEPS = 20
VALUES = ("train/loss", "train/grad_norm", "train/entropy", "rollout/reward")
PINNED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL,-AVX512DQ,-AVX512BW",
    "PYTHONHASHSEED": "0",
}


def key() -> str:
    """Return everything that may change bits: versions, and the make of the processor."""
    packages = [f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers")]
    return ", ".join([*packages, f"Python {platform.python_version()}", f"{platform.machine()} {_vendor()}"])


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def run_golden(folder: Path, processes: int) -> dict[str, Any]:
    """Run it; returns the values of every step as they were computed, and digests of the weights."""
    base = folder.with_name(f"{folder.name}-base")
    _run(
        [
            *(sys.executable, "-m", "megatron_dppo.commands.main", "base", "task:chain_sum", str(base)),
            *("--steps", "100", "--batch-size", "32", "--processes", str(processes)),
            *flags(run__threads_per_rank=1, parallel__expert_model_parallel_size=processes),
        ]
    )
    arguments = from_base(
        base,
        run__output_dir=folder,
        run__num_steps=STEPS,
        run__threads_per_rank=1,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        rollout__max_new_tokens=12,
        rollout__dtype="fp32",
        eval__max_prompts=4,
        eval__every=STEPS,
        log__tensorboard="false",
        parallel__expert_model_parallel_size=processes,
    )
    _run(command(arguments, processes))
    assert_trains(folder, evaluation_may_stay=True)
    steps = [record for record in records(folder) if record["step"]]
    return {
        "steps": [{name: record[name].hex() for name in VALUES} for record in steps],
        "base": _digest(base / "model.safetensors"),
        "weights": _digest(folder / "hf/model.safetensors"),
    }


def _run(arguments: list[str]) -> None:
    done = subprocess.run(
        arguments, env=environment() | PINNED, capture_output=True, text=True, timeout=420, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_golden() -> dict[str, Any]:
    """The committed file: ``{"why": text, "runs": {key: {processes: what run_golden gave}}}``."""
    result: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return result
