"""flash-linear-attention's kernels are the rule in torch; when a layer takes them, and what a run says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore import delta_rule, fusions
from tests.unit.interpret_delta_kernels import LENGTHS, NAMES
from tests.unit.wheels import unpacked

HAS_TRITON = importlib.util.find_spec("triton") is not None
BOUNDS = {"torch.float32": 1e-5, "torch.float16": 3e-3}
"""Bound of the error relative to float64; torch's own in fp16 is 6e-4."""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason=f"no Triton on {platform.system()} {platform.machine()}")
def test_the_real_kernels_in_tritons_interpreter_are_the_rule_in_torch(tmp_path: Path) -> None:
    folder = unpacked("fla-core==0.6.0", tmp_path)
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.interpret_delta_kernels", str(folder)],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(BOUNDS) * len(LENGTHS) * len(NAMES)
    for line in lines:
        bound = BOUNDS[line["name"].split()[-1]]
        assert max(line["fla"].values()) < bound, line


def config(**changes: Any) -> Any:
    fields = dict(
        use_cpu_initialization=False,
        params_dtype=torch.bfloat16,
        deterministic_mode=False,
        linear_attention_freq=[1, 0],
        num_moe_experts=None,
        **dict.fromkeys(fusions.FUSIONS, True),
    )
    return SimpleNamespace(**fields | changes)


def test_a_layer_takes_the_kernels_on_cuda_in_half_precision_if_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = delta_rule.TORCH_KERNELS
    kernels = plain._replace(mix=lambda *_: torch.empty(0))
    monkeypatch.setattr(delta_rule, "fla_kernels", lambda: kernels)
    assert delta_rule.choose_kernels(config()) is plain  # not installed here
    says = fusions.summarize_kernels(config(), {}, engine=True)
    assert says.endswith(
        f"warning: gated delta nets by plain torch, slower and with more memory: pip install '{delta_rule.FLA}'"
    )
    for module in (delta_rule, fusions):
        monkeypatch.setattr(module, "has_fla", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": "3.6.0"}[name])
    with pytest.raises(
        ConfigError,
        match=r"triton 3\.6\.0 .*'torch>=2\.13'.*Triton 3\.7\.1",
    ):
        delta_rule.choose_kernels(config())
    assert delta_rule.choose_kernels(config(deterministic_mode=True)) is plain
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": "3.7.1"}[name])
    assert delta_rule.choose_kernels(config()) is kernels
    assert delta_rule.choose_kernels(config(params_dtype=torch.float16)) is kernels
    assert fusions.summarize_kernels(config(), {}, engine=True).endswith("gated delta nets by flash-linear-attention")
    for change in ({"params_dtype": torch.float32}, {"deterministic_mode": True}):
        assert delta_rule.choose_kernels(config(**change)) is plain
        assert "is for bf16 and fp16, without determ" in fusions.summarize_kernels(config(**change), {}, engine=True)
    assert delta_rule.choose_kernels(config(use_cpu_initialization=True)) is plain
    assert "delta" not in fusions.summarize_kernels(config(linear_attention_freq=None), {}, engine=True)
