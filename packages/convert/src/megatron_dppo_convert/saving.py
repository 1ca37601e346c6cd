"""Writers of the weights that a converter holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import Quantization
from megatron_dppo.run.conversion import Converter

_LAYOUT_FILE = "conversion.json"


def save_megatron(converter: Converter, target: Path) -> None:
    """Write a ``torch_dist`` checkpoint of the weights."""
    from megatron_dppo.mcore.checkpoint.save_load import save_model

    if target.exists():
        raise CheckpointError(f"{target} already exists; choose another folder or delete it")
    # No rank may create the folder before every rank has looked for it.
    dist.barrier()
    text = json.dumps({"hf_folder": str(converter.hf_folder), "layout": str(converter.layout)}, indent=2)
    save_model(target, converter.models, {_LAYOUT_FILE: text + "\n"})


def save_hf(converter: Converter, target: Path, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
    """Stream the weights to a Hugging Face folder; each rank writes some of its files."""
    save_hf_folder(
        target, converter.hf_folder, converter.export(), dtype, group=dist.group.WORLD, quantization=quantization
    )
