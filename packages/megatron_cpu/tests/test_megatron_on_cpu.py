"""Released Megatron on a CPU, without the trainer: each in a fresh interpreter, as it is bound to a device for life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
ATTENTION = """
import torch
import torch.distributed as dist
from megatron_dppo_megatron_cpu.shims import apply_shims
assert apply_shims(is_cuda=False) and not apply_shims(is_cuda=False)
from types import SimpleNamespace
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron_dppo_megatron_cpu.attention import PackedRow, SDPACoreAttention

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0, use_cpu_initialization=True
)
attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self")
torch.manual_seed(0)
starts = [0, 3, 4, 9]
positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:])])
batch = SimpleNamespace(cu_seqlens=torch.tensor(starts, dtype=torch.int32), max_seqlen=5, position_ids=positions)
q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
packed = attention(q, k, v, None, AttnMaskType.causal, packed_seq_params=PackedRow.from_batch(batch, starts))
expected = torch.empty(9, 2, 4, dtype=torch.float64)
for start, end in zip(starts, starts[1:]):
    for t in range(start, end):
        for head in range(2):
            scores = k[start : t + 1, head].double() @ q[t, head].double() / 4**0.5
            expected[t, head] = scores.softmax(0) @ v[start : t + 1, head].double()
print((packed.view(9, 2, 4).double() - expected).abs().max().item() < 1e-6)
"""


def run(*arguments: str) -> list[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_learns() -> None:
    losses = [float(line) for line in run(str(FOLDER / "example.py"))]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_packed_attention_is_that_of_each_sequence_alone_in_float64() -> None:
    assert run("-c", ATTENTION) == ["True"]


@pytest.mark.parametrize("version", ["0.15.9", "0.20.0"])
def test_an_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from megatron_dppo_megatron_cpu.shims import UnsupportedMegatronError, apply_shims

    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedMegatronError, match=f"megatron-core {version} is installed"):
        apply_shims(is_cuda=False)
