"""Run every check and print its results (started by run_all.sh).

Each group is a process of its own: an error of a kernel leaves a process without its device.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tests.gpu.checks import Result

# With wheels installed without their dependencies, a part of pydantic can be missing alone.
CONFIG = ("torch", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
MODEL = ("megatron.core", "numpy", "packaging", "transformers", "safetensors")
RUN = (*CONFIG, *MODEL, "tomli_w", "aiohttp", "orjson", "psutil", "pybase64")
GROUPS = {
    "doctor": ("tests.gpu.check_doctor", RUN),
    "job": ("tests.gpu.check_job", RUN),
    "head": ("tests.gpu.check_head", CONFIG),
    "teacher": ("tests.gpu.check_teacher", CONFIG),
    "model": ("tests.gpu.check_model", (*CONFIG, *MODEL)),
    "kernels": ("tests.gpu.check_kernels", (*CONFIG, *MODEL)),
    "delta": ("tests.gpu.check_delta", (*CONFIG, *MODEL)),
    "devices": ("tests.gpu.check_devices", (*CONFIG, *MODEL)),
    "sharing": ("tests.gpu.check_sharing", RUN),
    "runs": ("tests.gpu.check_runs", RUN),
    "waits": ("tests.gpu.check_waits", (*CONFIG, *MODEL)),
    "vocab": ("tests.gpu.check_vocab", CONFIG),
    "losses": ("tests.gpu.check_losses", CONFIG),
    "plan": ("tests.gpu.check_plan", (*CONFIG, *MODEL, "tomli_w")),
    "layers": ("tests.gpu.check_layers", (*CONFIG, *MODEL, "tomli_w")),
    "speed": ("tests.gpu.check_speed", CONFIG),
}
"""group -> (module, the imports it needs); what tells most about a new machine comes first"""
TIMED = ("layers", "speed")
"""Groups that have the device to themselves, after the others."""
SECONDS = 900

BRING = """missing imports: {names}
Bring their wheels. On a machine with network, for Python 3.12 on x86-64:
  get="pip download --only-binary=:all: --python-version 3.12 -d DIR
       --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64"
  $get --no-deps megatron-core==0.19.2
  $get pydantic
  $get tomli_w aiohttp orjson psutil pybase64
Then copy DIR here and add --wheels DIR."""


def missing_imports(groups: list[str]) -> list[str]:
    """Return the packages that the groups need and this interpreter does not have."""
    return sorted({name for group in groups for name in GROUPS[group][1] if not _found(name)})


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def measure(group: str, device: torch.device) -> Iterable[Result]:
    """The results of one group, which is imported only now: a failing import is a failed check like any other."""
    results: Iterable[Result] = importlib.import_module(GROUPS[group][0]).check(device)
    return results


def run_group(group: str, device: torch.device, scale: float) -> list[Result]:
    """Run one group in this process."""
    from tests.gpu.checks import run_check

    return run_check(group, functools.partial(measure, group), device, scale)


def run_groups(groups: list[str], options: argparse.Namespace) -> list[Result]:
    """Run each group in a process of its own, ``--jobs`` at a time, and print the output of each as it ends."""
    beside, alone = [g for g in groups if g not in TIMED], [g for g in groups if g in TIMED]
    with TemporaryDirectory() as folder:
        run = functools.partial(_run_child, Path(folder), options)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, beside))
        results += [run(group) for group in alone]
    return [result for group in results for result in group]


def _run_child(folder: Path, options: argparse.Namespace, group: str) -> list[Result]:
    from tests.gpu.checks import Result, table

    path, start = folder / f"{group}.json", time.perf_counter()
    command = [sys.executable, "-m", "tests.gpu.run_all", "--only", group, "--json", str(path)]
    command += ["--cpu-rehearsal"] * options.cpu_rehearsal
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS
        )
        output, end = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, end = (error.output or b"").decode(errors="replace"), f"still running after {SECONDS} s"
    results = [Result(f"{group}: stopped", float("nan"), 0.0, f"{end}: {output[-300:]}")]
    if path.exists():
        results = [Result(**fields) for fields in json.loads(path.read_text())]
    # All of it now: whoever stops the script keeps what is done.
    print(f"{output.rstrip()}\n{table(results)}\n{group}: {time.perf_counter() - start:.1f} s", flush=True)
    return results


def main() -> int:
    """Exit code: see run_all.sh."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run_all.sh",
        epilog="--wheels DIR: install the wheels in DIR into a temporary folder first",
    )
    parser.add_argument("--only", default=",".join(GROUPS), help=f"comma-separated, of {', '.join(GROUPS)}")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    parser.add_argument(
        "--jobs", type=int, default=1, help=f"groups side by side; {' and '.join(TIMED)} are alone (default 1)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write machine and table here, to commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups = options.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown group {sorted(unknown)}; known: {', '.join(GROUPS)}")
    if missing := missing_imports(groups):
        print(BRING.format(names=", ".join(missing)), file=sys.stderr)
        return 2
    import torch

    from tests.gpu.checks import markdown, table

    if not torch.cuda.is_available() and not options.cpu_rehearsal:
        print("no CUDA device here; --cpu-rehearsal runs the same checks on the CPU", file=sys.stderr)
        return 3
    if options.json is not None:
        device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
        results = run_group(groups[0], device, float(os.environ.get("GPU_CHECKS_BOUND_SCALE", "1")))
        options.json.write_text(json.dumps([asdict(result) for result in results]))
        return 0
    name = platform.processor() or "CPU" if options.cpu_rehearsal else torch.cuda.get_device_name()
    print(f"device: {name}; torch {torch.__version__}; Python {platform.python_version()}", flush=True)
    results = run_groups(groups, options)
    failed, passed = sum(r.failed for r in results), sum(r.passed for r in results)
    if failed:
        print(f"\n{table(r for r in results if r.failed)}")
    print(f"\n{passed} passed, {failed} failed, {len(results) - passed - failed} not run")
    if options.markdown is not None:
        from megatron_dppo_doctor.doctor.machine import format_machine, inspect_machine

        options.markdown.write_text(markdown(results, format_machine(inspect_machine())), encoding="utf-8")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
