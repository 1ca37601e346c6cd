"""Safetensors files of a Hugging Face folder: which of them hold the model, and which weights they hold.

``model.safetensors.index.json`` decides. A folder may hold other files beside the model: shards of an older save, the
weights in the authors' own names (``consolidated.safetensors``), adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import is_lfs_pointer
from megatron_dppo.hf.families.rules import EMBEDDING, OUTPUT
from megatron_dppo.hf.published_names import StoredWeight, is_carried, stored_weights

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of unquantized weights, by their names in safetensors files."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class WeightSource(Protocol):
    """Source of full Hugging Face tensors by their on-disk name."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""

    def names(self) -> set[str]:
        """Return all names."""


def is_known_buffer(name: str) -> bool:
    """Return True for a buffer that old folders hold and that follows from config.json: rotary frequencies."""
    return _BUFFER.fullmatch(name) is not None


@dataclass(frozen=True)
class WeightFiles:
    """Files that hold a model, and the safetensors files beside them."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, Path] | None
    """File of each weight by name, from the index. None without an index."""
    ignored: tuple[str, ...]
    """Names of safetensors files that do not belong to the model."""


def find_weight_files(folder: Path, key: str) -> WeightFiles:
    """Return the files that hold a folder's model.

    They are those of the index. Without an index: ``model.safetensors``, a complete set of numbered shards, or the
    only file.

    Args:
        folder: Folder of the model.
        key: Configuration key of the path, for messages.

    Raises:
        CheckpointError: There are no weights, a file is missing, or several files could be the model.
    """
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        weight_map = _read_index(index, key)
        chosen = sorted(set(weight_map.values()))
        _check_index_files(folder, chosen, names, key)
        files = {name: folder / name for name in chosen}
        return WeightFiles(
            tuple(files.values()),
            {weight: files[name] for weight, name in weight_map.items()},
            tuple(name for name in names if name not in files),
        )
    chosen = _choose_without_index(folder, names, key)
    return WeightFiles(
        tuple(folder / name for name in chosen), None, tuple(name for name in names if name not in chosen)
    )


def _read_index(index: Path, key: str) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = dict(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"Expected JSON with 'weight_map' in {index}, got {type(error).__name__}: {error}. Fix: copy the folder of "
            f"{key} again."
        ) from error
    for weight, name in entries.items():
        path = PurePosixPath(name) if isinstance(name, str) else None
        if path is None or path.name != name or path.suffix != ".safetensors":
            raise CheckpointError(
                f"Expected names of *.safetensors files of the folder in {index}, got {name!r} for {weight}. Fix: copy "
                f"the folder of {key} again."
            )
    if not entries:
        raise CheckpointError(f"Expected weights in {index}, got an empty 'weight_map'. Fix: copy the folder again.")
    return entries


def _check_index_files(folder: Path, chosen: list[str], names: list[str], key: str) -> None:
    absent = [name for name in chosen if name not in names]
    alone = f" ({SINGLE} is there: if it is the model, delete the index)" if absent and SINGLE in names else ""
    if absent:
        raise CheckpointError(
            f"{key} = {str(folder)!r}: {INDEX} names {absent[0]} ({len(chosen)} files in all), which is not there; "
            f"copy the folder again{alone}"
        )
    if SINGLE in names and SINGLE not in chosen:
        raise CheckpointError(
            f"{key} = {str(folder)!r} holds two models: {SINGLE}, which transformers reads, and {chosen[0]}"
            f"{', ...' if len(chosen) > 1 else ''} of {INDEX}, which servers read. Delete one of the two"
        )


def _choose_without_index(folder: Path, names: list[str], key: str) -> list[str]:
    if SINGLE in names:
        return [SINGLE]
    # A folder of PEFT has the adapter beside the model.
    names = [name for name in names if name != ADAPTER_FILE]
    sets: dict[tuple[str, int], set[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(name)
    if len(sets) == 1:
        ((_, count), shards), *_ = sets.items()
        if len(shards) != count:
            raise CheckpointError(
                f"{key} = {str(folder)!r} has {len(shards)} of {count} numbered safetensors files and no {INDEX}; copy "
                "the folder again"
            )
        return sorted(shards)
    if len(names) == 1 and not sets:
        return names
    if not names:
        pickled = any(folder.glob("pytorch_model*.bin"))
        hint = " (its pytorch_model*.bin are pickle files; save them as safetensors with transformers)"
        raise CheckpointError(
            f"{key} = {str(folder)!r} has no *.safetensors weights{hint if pickled else ''}; expected a complete "
            "Hugging Face folder (or set model.random_init = true together with a warm-up)"
        )
    raise CheckpointError(
        f"{key} = {str(folder)!r} has several safetensors files and no {INDEX} that says which are the model: "
        f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Copy the index, or delete the others"
    )


def open_weight_file(file: Path) -> Any:
    """Open a safetensors file; its weights are not read yet.

    Raises:
        CheckpointError: It is no file, a pointer of Git LFS, damaged, or cannot be mapped into memory.
    """
    # Opening a named pipe would wait forever.
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file; copy the folder again")
    if is_lfs_pointer(file):
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights; run git lfs pull in its folder")
    try:
        return safe_open(file, framework="pt")
    # torch maps the file and raises RuntimeError if the system refuses.
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}. Copy the file again") from error


class FolderWeights:
    """Safetensors weights of a folder's model, with random access by name.

    Args:
        path: Folder of the model.
        key: Configuration key of the path, for messages.

    Attributes:
        buffers: Names of stored buffers that follow from config.json. They are not read.
        carried: Weights by name that are not trained, and that exported folders get unchanged.
        ignored_files: Names of safetensors files beside the model's.

    Raises:
        CheckpointError: See ``find_weight_files`` and ``open_weight_file``.
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
        self.buffers = sorted(filter(is_known_buffer, weight_map))
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
        """Stream all weights by name. For a ``tied`` model the output layer is omitted: it is the embedding.

        Raises:
            CheckpointError: The output layer of a ``tied`` model is not the embedding.
        """
        if tied:
            check_tied_output(self)
        for name in sorted(self._files):
            if not (tied and name == OUTPUT.hf[0]):
                yield name, self[name]


def _map_of_files(stored: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Return the file of each weight, where no index says it.

    Raises:
        CheckpointError: Two files hold the same weight.
    """
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
    """Check that a tied model's output layer, if it is stored, equals its embedding.

    Raises:
        CheckpointError: They differ.
    """
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
