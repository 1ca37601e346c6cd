"""Safetensors files of a Hugging Face folder: which of them hold the model.

``model.safetensors.index.json`` decides. A folder may hold other files beside the model: shards of an older save, the
weights in the authors' own names (``consolidated.safetensors``), adapters.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from megatron_dppo_engines.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class WeightFiles:
    """Files that hold a model, and the safetensors files beside them."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, Path] | None
    """File of each weight by name, from the index. None without an index."""
    ignored: tuple[str, ...]
    """Names of safetensors files that do not belong to the model."""


def find_weight_files(folder: Path, key: str) -> WeightFiles:
    """Return the files that hold a folder's model; ``CheckpointError`` names the folder's ``key``.

    They are those of the index. Without an index: ``model.safetensors``, a complete set of numbered shards, or the only
    file.
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
            "Hugging Face folder"
        )
    raise CheckpointError(
        f"{key} = {str(folder)!r} has several safetensors files and no {INDEX} that says which are the model: "
        f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Copy the index, or delete the others"
    )


def open_weight_file(file: Path) -> safe_open:
    """Open a safetensors file, without its weights; ``CheckpointError`` if it cannot be read."""
    # Opening a named pipe would wait forever.
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file; copy the folder again")
    # A text file in place of a large one that was not fetched.
    with file.open("rb") as stream:
        is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights; run git lfs pull in its folder")
    try:
        return safe_open(file, framework="pt")
    # torch maps the file and raises RuntimeError if the system refuses.
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}. Copy the file again") from error
