"""A Hugging Face folder as a quantised one."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import FolderWeights, model_shape, read_hf_config
from megatron_dppo.weights.hf_folder import save_hf_folder
from megatron_dppo.weights.quantization import Format, Quantization


def quantize_folder(source: Path, target: Path, form: Format, dtype: torch.dtype) -> int:
    """Write ``target``, one tensor after the other; returns how many weights are quantised.

    Args:
        source: a model in bf16, fp16 or fp32.
        target: is written whole, or not at all.
        form: see ``Quantization``.
        dtype: that the weights are rounded to first; what is not quantised stays in it.

    Raises:
        CheckpointError: no folder of a model that is known, one that is quantised already, or nothing to quantise.
    """
    hf_config = read_hf_config(source)
    model_shape(hf_config)
    weights, how = FolderWeights(source), Quantization(form)
    count = sum(how.takes(name) for name in weights.names())
    if not count:
        raise CheckpointError(
            f"{source} has no routed experts, which are what int4 quantises; expected a "
            "mixture-of-experts model, or --format fp8"
        )
    save_hf_folder(target, source, weights.stream(tied=hf_config.tie_word_embeddings), dtype, quantization=how)
    return count
