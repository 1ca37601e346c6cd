"""Checks of a folder before an inference server is told to read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo_engines.errors import CheckpointError
from megatron_dppo_engines.servers.updates import check_adapter, check_weights


def test_folders_of_weights_and_of_adapters_are_checked_before_a_server_reads_them(tmp_path: Path) -> None:
    """Each has its own file: adapters have no model, and a model beside adapters is no adapter."""
    adapters, weights = tmp_path / "adapters", tmp_path / "weights"
    for folder, name in ((adapters, "adapter_model.safetensors"), (weights, "model.safetensors")):
        folder.mkdir()
        save_file({"a": torch.zeros(2)}, folder / name)
    check_adapter(adapters)
    check_weights(weights)
    check_weights(tmp_path / "on the server's machine")
    check_adapter(tmp_path / "on the server's machine")
    with pytest.raises(CheckpointError, match="safetensors weights"):
        check_weights(adapters)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is not a file"):
        check_adapter(weights)
    (adapters / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="a readable safetensors file"):
        check_adapter(adapters)
