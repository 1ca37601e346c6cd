"""INT4 weights by AWQ, as nvidia-modelopt calibrates and exports them: for a model that is done, not for rollouts.

AWQ scales the inputs of each layer by what it sees of texts, so that a new version of the weights would have to be
calibrated again; servers of a run take none (``run/served_model.py``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.errors import CheckpointError, ConfigError, DataError
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.hf import model_shape, read_hf_config
from megatron_dppo.platform import Platform
from megatron_dppo.weights.hf_folder import COPIED

_PAIR = "pip install 'nvidia-modelopt==0.47.*' 'transformers==4.57.6', in an environment of its own"
_SAMPLES = 512
_TOKENS = 512
"""Texts, and tokens of each, that are looked at: modelopt's own defaults."""
_BLOCK = 128
"""Inputs that have a scale together."""


def require_awq() -> None:
    """Refuse versions whose export fails after all of the work.

    Raises:
        ConfigError: nvidia-modelopt is missing, or transformers is one that it cannot export experts of.
    """
    try:
        modelopt = version("nvidia-modelopt")
    except PackageNotFoundError:
        raise ConfigError(f"int4_awq is made by nvidia-modelopt, which is not installed; {_PAIR}") from None
    transformers = version("transformers")
    if int(transformers.split(".")[0]) >= 5:
        raise ConfigError(
            f"int4_awq: nvidia-modelopt {modelopt} cannot export the fused experts of transformers {transformers}; "
            f"{_PAIR}"
        )


def quantize_awq(source: Path, target: Path, calibration: Path) -> int:
    """Calibrate and write ``target``; returns the number of texts that were looked at.

    Args:
        source: a model's folder in bf16 or fp16; all of it is loaded, on the GPU if there is one.
        target: is written whole, or not at all.
        calibration: lines of JSON with a key ``text``.

    Raises:
        ConfigError: see ``require_awq``.
        CheckpointError: ``source`` cannot be read, or has sizes that AWQ cannot group.
        DataError: ``calibration`` has no texts.
        DiskError: ``target`` cannot be written.
    """
    require_awq()
    hf_config = read_hf_config(source)
    model_shape(hf_config)
    _check_sizes(hf_config)
    texts = _read_texts(calibration)
    platform = Platform.detect(0)
    from megatron_dppo.mcore.compat import apply_shims

    apply_shims(platform)  # before modelopt imports Megatron
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantization = import_module("modelopt.torch.quantization")
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True).to(platform.device).eval()

    def look(model: Any) -> None:
        for ids in _tokens(texts, tokenizer):
            model(ids.to(platform.device))

    with torch.no_grad():
        model = quantization.quantize(model, quantization.INT4_AWQ_CFG, look)
    _export(model, source, target)
    return len(texts)


def _export(model: Any, source: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial")
    with disk_errors(target, "the weights"):
        shutil.rmtree(partial, ignore_errors=True)
        with torch.inference_mode():
            import_module("modelopt.torch.export").export_hf_checkpoint(model, export_dir=partial)
        for file in source.iterdir():
            new = partial / file.name
            if file.suffix in COPIED and "safetensors" not in file.name and not new.exists():
                shutil.copyfile(file, new)
        partial.rename(target)


def _check_sizes(hf_config: Any) -> None:
    """modelopt notices after the calibration."""
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        size = getattr(hf_config, name, None)
        if size is not None and size % _BLOCK:
            raise CheckpointError(
                f"{name} = {size}: AWQ has a scale for {_BLOCK} inputs, so expected a multiple of it; use fp8"
            )


def _read_texts(file: Path) -> list[str]:
    if not file.is_file():
        raise DataError(f"--calibration {file} does not exist; expected lines of JSON with a key 'text'")
    texts = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not text:
            raise DataError(f"{file}, line {number}: {line[:60]!r}; expected JSON with a text under the key 'text'")
        texts.append(text)
        if len(texts) == _SAMPLES:
            break
    if not texts:
        raise DataError(f"{file} is empty; expected texts like those of the model's use, some hundred of them")
    return texts


def _tokens(texts: list[str], tokenizer: Any) -> Iterator[torch.Tensor]:
    for text in texts:
        if ids := tokenizer.encode(text)[:_TOKENS]:
            yield torch.tensor([ids])
