"""Changes by the shims, each in a fresh interpreter: Megatron is bound to a device for the life of a process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo_megatron_cpu.fused_adam import FusedAdam
from megatron_dppo.parallel.platform import Platform

to_cuda = torch.Tensor.cuda
first, second = (apply_shims(Platform(torch.device("DEVICE"), "BACKEND")) for _ in range(2))
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

print(first, second)
print(optimizer.Adam is distrib_optimizer.Adam is FusedAdam, optimizer.USING_PYTORCH_OPTIMIZER)
print(torch.Tensor.cuda is to_cuda, CudaRNGStatesTracker.__module__.startswith("megatron.core"))
"""


def shims_on(device: str, backend: str) -> list[str]:
    program = PROGRAM.replace("DEVICE", device).replace("BACKEND", backend)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="its Adam needs no replacement")
def test_on_cuda_without_transformer_engine_adam_is_replaced_and_the_device_code_is_left_alone() -> None:
    assert shims_on("cuda", "nccl") == ["True False", "True False", "True True"]


@pytest.mark.slow
def test_on_cpu_the_device_code_is_replaced_too() -> None:
    assert shims_on("cpu", "gloo") == ["True False", "True False", "False False"]


def test_fields_that_rename_or_quantize_weights_cannot_be_set() -> None:
    names = ["moe_single_grouped_weight", "use_grouped_gemm_for_shared_expert", "fp8_param", "fp4", "fp4_param"]
    program = f"""
import torch
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

apply_shims(Platform(torch.device("cpu"), "gloo"))
from megatron_dppo.mcore.model import checked_overrides

assert checked_overrides({{"moe_z_loss_coeff": 0.1}}, router_replay=False)
for name in {names!r}:
    try:
        checked_overrides({{name: True}}, router_replay=False)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stdout + done.stderr
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"model.transformer.{name} = True: ") and "weights" in line
