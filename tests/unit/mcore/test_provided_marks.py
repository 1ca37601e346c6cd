"""Marks of tensor parallelism on the parameters of a model that Megatron Bridge builds, with a stub of the model."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_dppo.mcore import megatron_bridge, model

MARKS = {
    "decoder.layers.0.self_attention.core_attention.softmax_offset": (False, True),
    "decoder.layers.0.mlp.experts.linear_fc1.weight0": (False, True),
    "decoder.layers.0.mlp.experts.linear_fc2.weight3": (False, True),
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (True, False),
    "decoder.layers.0.self_attention.linear_q_down_proj.weight": (True, False),
    "decoder.layers.0.self_attention.linear_qkv.weight": (True, True),
    "decoder.layers.0.input_layernorm.weight": (False, False),
    "decoder.layers.0.mlp.router.weight": (False, False),
}
"""Mark that Megatron has set, and the right one, of each parameter."""


class StubModel(nn.Module):
    """Parameters by name, marked as Megatron Core marks them with Transformer Engine's layers."""

    def __init__(self) -> None:
        super().__init__()
        for name, (mark, _) in MARKS.items():
            *path, last = name.split(".")
            module: Any = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            parameter = nn.Parameter(torch.zeros(2))
            parameter.tensor_model_parallel = mark  # type: ignore[attr-defined]
            module.register_parameter(last, parameter)


@contextmanager
def no_chunks() -> Any:
    yield []


@pytest.mark.parametrize("vpp_size", [None, 2])
def test_marks_of_a_provided_model_are_corrected_in_every_chunk(
    vpp_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_bridge, "GPTModel", StubModel)
    monkeypatch.setattr(model, "hand_out_hidden_states", lambda chunk: None)
    monkeypatch.setattr(model, "output_layer_without_fusion", no_chunks)
    groups = SimpleNamespace(use_mpu_process_groups=lambda: None)
    monkeypatch.setattr(megatron_bridge, "ProcessGroupCollection", groups)
    provider = SimpleNamespace(
        virtual_pipeline_model_parallel_size=vpp_size,
        pipeline_model_parallel_size=1,
        provide=lambda **_: StubModel(),
    )
    chunks = megatron_bridge.build_provided_model(provider, 0, torch.device("cpu"))
    assert len(chunks) == (vpp_size or 1)
    for chunk in chunks:
        marks = {name: parameter.tensor_model_parallel for name, parameter in chunk.named_parameters()}  # type: ignore[attr-defined]
        assert marks == {name: right for name, (_, right) in MARKS.items()}
