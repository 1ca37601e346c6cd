"""What a model weighs, and whether the weights of a folder are all there: by the files' headers, no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf import weight_shapes


def parameter_count(hf_config: Any) -> int:
    """All weights; tied ones once."""
    return sum(torch.Size(shape).numel() for shape in weight_shapes(hf_config).values())


def check_weights_fit(path: str | Path, hf_config: Any, key: str = "model.path") -> None:
    """Refuse a folder whose safetensors files are missing, cut off, or of another model than its config.json.

    Args:
        path: the folder.
        hf_config: its configuration.
        key: where the path stands in the configuration, for messages.

    Raises:
        CheckpointError: with the first names that are missing or have other shapes.
    """
    folder = Path(path)
    files = {file.name for file in folder.glob("*.safetensors")}
    if not files:
        raise CheckpointError(
            f"{key} = {str(path)!r} has no *.safetensors weights; expected a complete Hugging Face folder "
            "(or set model.random_init = true together with a warm-up)"
        )
    if absent := sorted(_files_of_index(folder) - files):
        raise CheckpointError(
            f"{key} = {str(path)!r}: model.safetensors.index.json names {absent[0]} ({len(absent)} files in all), "
            "which is not there; copy the folder again"
        )
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(files):
        try:
            with safe_open(folder / name, framework="pt") as handle:
                found |= {weight: tuple(handle.get_slice(weight).get_shape()) for weight in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / name} is not a readable safetensors file: {error}") from error
    expected = weight_shapes(hf_config)
    missing = [name for name in expected if name not in found]
    other = [name for name in expected if name in found and found[name] != expected[name]]
    if missing or other:
        name = (missing or other)[0]
        detail = "is missing" if missing else f"has shape {found[name]}, expected {expected[name]}"
        raise CheckpointError(
            f"{key} = {str(path)!r}: the weights do not fit config.json: {name} {detail} ({len(missing)} missing, "
            f"{len(other)} of other shapes)"
        )


def _files_of_index(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}; copy the folder again") from error
