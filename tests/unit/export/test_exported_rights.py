"""Exported weights can be read by whom the user's umask allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch

from megatron_dppo.export.adapter_folder import write_adapter
from megatron_dppo.export.hf_folder import save_hf_folder

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"


def test_exported_files_follow_the_umask(tmp_path: Path) -> None:
    for umask in (0o022, 0o027, 0o077):
        before = os.umask(umask)
        try:
            target = tmp_path / f"{umask:o}"
            save_hf_folder(target / "hf", MODEL, iter([("a", torch.ones(4)), ("b", torch.ones(4))]), torch.float32)
            write_adapter(target / "adapter", {"a": torch.ones(2)}, {"r": 1})
        finally:
            os.umask(before)
        weights = [*target.rglob("*.safetensors")]
        assert len(weights) == 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in weights} == {0o666 & ~umask}
