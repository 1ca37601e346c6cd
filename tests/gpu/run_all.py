"""Run every check on one device and print the table (started by run_all.sh)."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import sys
import time

import torch

GROUPS = {
    "losses": ("tests.gpu.check_losses", ("pydantic",)),
    "vocab": ("tests.gpu.check_vocab", ("pydantic",)),
    "model": ("tests.gpu.check_model", ("pydantic", "megatron.core", "transformers", "safetensors")),
}
"""group -> (module, packages it needs)"""


def missing_packages(groups: list[str]) -> list[str]:
    """What the groups need and this interpreter does not have."""
    needed = {package for group in groups for package in GROUPS[group][1]}
    return sorted(p for p in needed if importlib.util.find_spec(p.split(".")[0]) is None)


def main() -> int:
    """Exit code: see run_all.sh."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run_all.sh")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"comma-separated, of {', '.join(GROUPS)}")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    options = parser.parse_args()
    groups = options.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown group {sorted(unknown)}; known: {', '.join(GROUPS)}")
    if missing := missing_packages(groups):
        print(f"missing packages: {', '.join(missing)}; bring their wheels with --wheels DIR", file=sys.stderr)
        return 2
    if not torch.cuda.is_available() and not options.cpu_rehearsal:
        print("no CUDA device here; --cpu-rehearsal runs the same checks on the CPU", file=sys.stderr)
        return 3
    device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
    name = platform.processor() or "CPU" if options.cpu_rehearsal else torch.cuda.get_device_name()
    print(f"device: {name}; torch {torch.__version__}; Python {platform.python_version()}", flush=True)

    from tests.gpu.checks import run_check, table

    results = []
    for group in groups:
        start = time.perf_counter()
        results += run_check(group, importlib.import_module(GROUPS[group][0]).check, device)
        print(f"{group}: {time.perf_counter() - start:.1f} s", flush=True)
    failed = sum(not r.passed for r in results)
    print(f"\n{table(results)}\n\n{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
