"""Our mapping table against mbridge, an independent converter of the same models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.folder import model_shape, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.mcore import mapping
from megatron_dppo.parallel.platform import Platform
from tests.distributed.parity import hf_config, hf_reference
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def _compare(rank: int, world_size: int, folder: str) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(Platform.detect(force_cpu=True), packages=("megatron.core", "mbridge"))
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    config = hf_config(tied=False)
    bridge: Any = object.__new__(Qwen3MoEBridge)
    bridge.hf_config, bridge.make_vocab_size_divisible_by, bridge.dtype = config, None, None
    source, shape = FolderWeights(folder), model_shape(config)
    compared = 0
    for rule, layer, expert in mapping.parameters(shape, tied=False):
        name, hf_names = rule.names(layer, expert)
        theirs = bridge._weight_name_mapping_mcore_to_hf(name)
        assert list(theirs) == list(hf_names), (name, theirs, hf_names)
        full = rule.join([source[n] for n in hf_names], shape)
        expected = bridge._weight_to_mcore_format(name, [source[n] for n in hf_names])
        assert torch.equal(full, expected), name
        _, back = bridge._weight_to_hf_format(name, full)
        _assert_equal(rule.split(full, shape), list(back), name)
        compared += 1
    assert compared == 3 + config.num_hidden_layers * (7 + 2 * config.num_experts)


def _assert_equal(result: list[Tensor], expected: list[Tensor], name: str) -> None:
    assert len(result) == len(expected), name
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name


def test_every_weight_maps_as_in_mbridge(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    hf_config(tied=False).save_pretrained(tmp_path / "source")
    save_hf_folder(tmp_path / "model", tmp_path / "source", stream_model(hf_reference(tied=False)), torch.float32)
    run_distributed(_compare, 1, str(tmp_path / "model"))
