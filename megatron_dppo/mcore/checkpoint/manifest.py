"""What a checkpoint's files have to be, byte for byte: ``manifest.json`` with size and SHA-256 of every file.

It is written last and checked before anything of a checkpoint is read. It finds what rots, is cut off or goes missing;
against someone who writes files *and* manifest it proves nothing: see ``unpickling``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dppo.files import fsync, write_synced

MANIFEST = "manifest.json"


_FORMAT = 1


_THREADS = 4
"""SHA-256 runs without Python's lock: 0.3 to 2 GB/s a core"""


class FileRecord(NamedTuple):
    """One file of a checkpoint."""

    size: int
    """bytes"""
    sha256: str


def list_files(folder: Path) -> list[str]:
    """Every file below a folder but the manifest, sorted.

    ``.nfs*`` are left out: a network file system keeps a deleted file under such a name while it is open somewhere.
    """
    found = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    names = [path.relative_to(folder).as_posix() for path in found if not path.name.startswith(".nfs")]
    return sorted(name for name in names if name != MANIFEST)


def share(sizes: dict[str, int], rank: int, world_size: int) -> list[str]:
    """The files that one rank reads, so that all ranks read about equally many bytes."""
    loads, mine = [0] * world_size, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        # A byte each, so that empty files are spread too.
        loads[least] += sizes[name] + 1
        if least == rank:
            mine.append(name)
    return mine


def hash_files(folder: Path, names: Sequence[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Size and SHA-256 of files, several at a time; ``sync`` also brings them to the disk.

    Raises:
        OSError: a file cannot be read.
    """

    def record(name: str) -> FileRecord:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(file.tell(), digest)

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(record, names), strict=True))


def write_manifest(folder: Path, records: dict[str, FileRecord]) -> None:
    """Write the manifest of files that are complete, and bring the folder to the disk."""
    write_synced(folder / MANIFEST, _text({name: list(record) for name, record in records.items()}))
    for inner in {(folder / name).parent for name in records}:
        fsync(inner)


def _text(files: dict[str, Any]) -> str:
    body = json.dumps(files, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"format": _FORMAT, "files": files, "digest": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The files that a checkpoint should have; None when it has no manifest.

    Raises:
        ValueError: the manifest is damaged; the message says how.
    """
    try:
        text = (folder / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    try:
        found = json.loads(text)
        files = {str(name): FileRecord(*record) for name, record in found["files"].items()}
        is_whole = text == _text(found["files"]) and all(
            type(size) is int and type(sha256) is str for size, sha256 in files.values()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{MANIFEST} is damaged")
    return files


def find_name_or_size_problem(folder: Path, expected: dict[str, FileRecord]) -> str:
    """What is wrong with the folder before a byte is read: missing, extra and cut-off files; empty when nothing."""
    found = list_files(folder)
    if missing := sorted(expected.keys() - set(found)):
        return f"{missing[0]} is missing"
    if extra := sorted(set(found) - expected.keys()):
        return f"{extra[0]} does not belong to it (move it away if it is yours)"
    for name, record in sorted(expected.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    return ""


def find_content_problem(folder: Path, expected: dict[str, FileRecord], names: Sequence[str]) -> str:
    """Which of these files has other bytes than the manifest says; empty when none has."""
    try:
        found = hash_files(folder, names)
    except OSError as error:
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror})"
    wrong = sorted(name for name in names if found[name] != expected[name])
    return f"{wrong[0]} has other content than was written (SHA-256 differs)" if wrong else ""


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
