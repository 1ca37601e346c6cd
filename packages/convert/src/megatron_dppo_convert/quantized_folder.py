"""Quantized copy of a Hugging Face folder."""

from pathlib import Path

import torch

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import Format, Quantization
from megatron_dppo.hf.folder import model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights


def quantize_folder(source: Path, target: Path, form: Format, dtype: torch.dtype) -> int:
    """Write a quantized copy, one tensor after the other, and return the number of quantized weights.

    The target is complete or not there. Weights are rounded to ``dtype`` first; those that are not quantized keep it.
    """
    hf_config = read_hf_config(source)
    model_shape(hf_config)
    weights = FolderWeights(source)
    quantization = Quantization(form)
    count = sum(quantization.includes(name) for name in weights.names())
    if not count:
        raise CheckpointError(
            f"{source} has no routed experts, which are what int4 quantizes; expected a "
            "mixture-of-experts model, or --format fp8"
        )
    stream = weights.stream(tied=hf_config.tie_word_embeddings)
    save_hf_folder(target, source, stream, dtype, quantization=quantization)
    return count
