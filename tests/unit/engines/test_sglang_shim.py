"""Replacement of a GPU kernel in the shim that lets the unmodified SGLang wheel serve on a CPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch


def test_the_gate_of_a_shared_expert_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools/engines/sglang_shim"))
    monkeypatch.delitem(sys.modules, "sglang_cpu", raising=False)
    import sglang_cpu

    module = types.SimpleNamespace()
    sglang_cpu._gate_in_torch(module)
    hidden, shared, routed = (torch.randn(5, 8, dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(8, dtype=torch.bfloat16)
    gated = torch.sigmoid((hidden.double() * weight.double()).sum(1, keepdim=True)) * shared.double()
    for do_add, expected in ((True, gated + routed.double()), (False, gated)):
        output = routed.clone()
        module._launch_fused_gate_sigmoid_mul(hidden, weight, shared, output, do_add=do_add)
        torch.testing.assert_close(output, expected.bfloat16())
