"""The self-test of ``megatron-dppo doctor``: a process a device (two on the CPU), collectives, the head over all of
them, and a small model with experts through sampling, probe, router replay and an update."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_dppo_doctor.doctor.combinations import find_bad_combinations
from megatron_dppo_doctor.doctor.machine import format_machine, inspect_machine
from megatron_dppo_doctor.doctor.self_test import run_self_test
from tests.gpu.checks import Result


def check(device: torch.device) -> Iterator[Result]:
    """Prints what the machine has; its known-bad combinations are rows too."""
    machine = inspect_machine()
    print("\n".join(f"doctor: {line}" for line in format_machine(machine)))
    for finding in find_bad_combinations(machine):
        print(f"doctor: {finding}")
        yield Result(finding.observed.splitlines()[0], float(finding.combination.is_fatal), 0.0)
    report = run_self_test(len(machine.gpus) if device.type == "cuda" else 0)
    for one in report.checks:
        if one.bound is None:
            print(f"doctor: {one}")
        else:
            yield Result(one.name, one.value, one.bound)
    if report.failure is not None:
        raise RuntimeError(report.failure)
