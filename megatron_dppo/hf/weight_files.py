"""Weights of a Hugging Face folder by name; ``megatron_dppo_engines.weight_files`` says which files hold them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.rules import EMBEDDING, OUTPUT
from megatron_dppo.hf.published_names import StoredWeight, is_carried, stored_weights
from megatron_dppo_engines.weight_files import INDEX, find_weight_files, open_weight_file

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of unquantized weights, by their names in safetensors files."""
_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Rotary frequencies, buffers that old folders hold and that follow from config.json."""


class WeightSource(Protocol):
    """Source of full Hugging Face tensors by their on-disk name."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""

    def names(self) -> set[str]:
        """Return all names."""


class FolderWeights:
    """Safetensors weights of a folder's model, with random access by name.

    ``key`` is the configuration key of the path, for messages.

    Attributes:
        buffers: Names of stored buffers that follow from config.json. They are not read.
        carried: Weights by name that are not trained, and that exported folders get unchanged.
        ignored_files: Names of safetensors files beside the model's.
    """

    def __init__(self, path: str | Path, key: str = "model.path") -> None:
        selected = find_weight_files(Path(path), key)
        # Opened once: a file has thousands of tensors, and opening it reads the names of all.
        handles = {file: open_weight_file(file) for file in selected.files}
        stored = {file: set(handle.keys()) for file, handle in handles.items()}
        weight_map = _map_of_files(stored) if selected.weight_map is None else selected.weight_map
        for name, file in weight_map.items():
            if name not in stored[file]:
                raise CheckpointError(f"Expected {name} in {file}, as {INDEX} says, got none. Copy the folder again.")
        self.buffers = sorted(filter(_BUFFER.fullmatch, weight_map))
        self.carried = {n: StoredWeight(handles[file], n) for n, file in weight_map.items() if is_carried(n)}
        self._files: dict[str, StoredWeight] = {}
        files_by_name = {name: handles[file] for name, file in weight_map.items()}
        stored_names = weight_map.keys() - self.carried.keys() - set(self.buffers)
        for name, weight in stored_weights(files_by_name, stored_names):
            if name in self._files:
                raise CheckpointError(
                    f"Expected {name} once in {path}, got {self._files[name].name} and {weight.name}. Copy the folder "
                    "again."
                )
            self._files[name] = weight
        self.ignored_files = selected.ignored

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise CheckpointError(
                f"weight {name} is missing; the folder holds {sorted(self._files)[:3]}, ... Use a folder "
                "of this model, with all of its files"
            )
        try:
            return self._files[name].read()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"weight {name} cannot be read: {error}. Copy the folder again") from error

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return a weight's shape and its dtype in safetensors' words (``BF16``) without reading the weight."""
        return self._files[name].describe()

    def names(self) -> set[str]:
        """Return all weight names of the model."""
        return set(self._files)

    def note(self) -> str | None:
        """Return a line about what the folder holds beside the model. None if there is nothing."""
        parts = []
        if self.buffers:
            parts.append(f"{len(self.buffers)} buffers that follow from config.json ({self.buffers[0]})")
        if self.ignored_files:
            parts.append(f"files beside the model ({', '.join(self.ignored_files[:3])})")
        if self.carried:
            first = min(self.carried)
            parts.append(f"{len(self.carried)} weights that are not trained and go to exported folders ({first}, ...)")
        return f"weights  not read: {'; '.join(parts)}" if parts else None

    def stream(self, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
        """Stream all weights by name. For a ``tied`` model the output layer is omitted: it is the embedding."""
        if tied:
            check_tied_output(self)
        for name in sorted(self._files):
            if not (tied and name == OUTPUT.hf[0]):
                yield name, self[name]


def _map_of_files(stored: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Return the file of each weight, where no index says it."""
    weight_map: dict[str, Path] = {}
    for file, names in stored.items():
        for name in names:
            if name in weight_map:
                raise CheckpointError(
                    f"Expected each weight in one file, got {name} in {weight_map[name]} and {file.name}. Copy the "
                    f"folder again, with its {INDEX}."
                )
            weight_map[name] = file
    return weight_map


def check_tied_output(weights: WeightSource) -> None:
    """Check that a tied model's output layer, if it is stored, equals its embedding."""
    output, embedding = OUTPUT.hf[0], EMBEDDING.hf[0]
    if not {output, embedding} <= weights.names():
        return
    stored, expected = weights[output], weights[embedding]
    if stored.dtype != expected.dtype:
        stored, expected = stored.double(), expected.double()
    if not torch.equal(stored, expected):
        raise CheckpointError(
            f"Expected {output} to equal {embedding}, as config.json has tie_word_embeddings = true, got different "
            "tensors. Fix: set tie_word_embeddings = false in config.json if the model has an output layer."
        )
