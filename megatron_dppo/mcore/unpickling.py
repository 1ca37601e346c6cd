"""Reading Megatron's checkpoint files without running what is in them.

``.metadata`` is a pickle that torch reads by ``pickle.load`` (``FileSystemReader.read_metadata``, under Megatron Core
0.16.1 and 0.19.2 alike): a file can name any function there and have it called. Here it may name the classes that
torch's own writer names, and no others. All else that Megatron loads (``common.pt``, byte objects in the shards)
goes through ``torch.load``, which is forced to ``weights_only``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "BytesIOWriteData"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
}


class MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of a ``.metadata`` file and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name.

        Raises:
            pickle.UnpicklingError: it is not one of a checkpoint's metadata.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def check_metadata(checkpoint: Path) -> None:
    """Read ``.metadata`` once, by the rules above; torch logs a traceback for one that it cannot read.

    Raises:
        OSError: it cannot be read.
        pickle.UnpicklingError: it is damaged, or names something else than metadata.
    """
    with (checkpoint / ".metadata").open("rb") as file:
        try:
            found = MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__} instead of a checkpoint's metadata")


class _RestrictedPickle:
    """Stands for the module ``pickle`` where torch reads ``.metadata``."""

    @staticmethod
    def load(file: IO[bytes]) -> Any:
        return MetadataUnpickler(file).load()

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Every load of torch and Megatron in this block builds tensors and plain values only."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before, module = os.environ.get(name), filesystem.pickle  # type: ignore[attr-defined]
    os.environ[name] = "1"
    filesystem.pickle = _RestrictedPickle()  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        filesystem.pickle = module  # type: ignore[attr-defined]
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
