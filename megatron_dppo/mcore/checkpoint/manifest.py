"""Manifest of a checkpoint (``manifest.json``, size and SHA-256 of every file) and restricted unpickling.

The manifest is written last and checked before a checkpoint is read. It detects corrupted, truncated and missing files.
It does not protect against an attacker who writes files *and* manifest; ``restricted_loading`` does.
"""

import hashlib
import json
import os
import pickle
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dppo.files import fsync, read_regular_file, write_synced

MANIFEST = "manifest.json"
_FORMAT = 1
_THREADS = 4
"""Threads that hash files. SHA-256 releases the GIL and runs at 0.3 to 2 GB/s per core."""


class FileRecord(NamedTuple):
    """Size and hash of one file of a checkpoint."""

    size: int
    """Size in bytes."""
    sha256: str


def list_files(folder: Path) -> list[str]:
    """Return every file below a folder except the manifest, sorted.

    ``.nfs*`` files are ignored: NFS keeps a deleted file under such a name while a process has it open.
    """
    paths = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    names = [path.relative_to(folder).as_posix() for path in paths if not path.name.startswith(".nfs")]
    return sorted(name for name in names if name != MANIFEST)


def assign_files(sizes: dict[str, int], rank: int, world_size: int) -> list[str]:
    """Return the files that one rank reads, such that all ranks read about as many bytes."""
    loads = [0] * world_size
    assigned = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        # One more byte per file spreads empty files too.
        loads[least] += sizes[name] + 1
        if least == rank:
            assigned.append(name)
    return assigned


def hash_files(folder: Path, names: Sequence[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Return size and SHA-256 of files, in several threads; ``sync`` also syncs them to disk."""

    def record(name: str) -> FileRecord:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(file.tell(), digest)

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(record, names), strict=True))


def write_manifest(folder: Path, records: dict[str, FileRecord]) -> None:
    """Write the manifest of complete files, and sync their folders to disk."""
    write_synced(folder / MANIFEST, _serialize({name: list(record) for name, record in records.items()}))
    for inner in {(folder / name).parent for name in records}:
        fsync(inner)


def _serialize(files: dict[str, Any]) -> str:
    body = json.dumps(files, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"format": _FORMAT, "files": files, "digest": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Return the files that a checkpoint must have, None without a manifest. ValueError: it is damaged."""
    try:
        text = read_regular_file(folder / MANIFEST).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    try:
        document = json.loads(text)
        files = {str(name): FileRecord(*record) for name, record in document["files"].items()}
        # The text must be exactly what was written, digest included.
        is_intact = text == _serialize(document["files"]) and all(
            type(size) is int and type(sha256) is str for size, sha256 in files.values()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise ValueError(f"{MANIFEST} is damaged")
    return files


def find_name_or_size_problem(folder: Path, expected: dict[str, FileRecord]) -> str:
    """Return the first missing, extra or truncated file of a folder as a message; empty if there is none."""
    names = set(list_files(folder))
    if missing := sorted(expected.keys() - names):
        return f"{missing[0]} is missing"
    if extra := sorted(names - expected.keys()):
        return f"{extra[0]} does not belong to it (move it away if it is yours)"
    for name, record in sorted(expected.items()):
        try:
            status = (folder / name).stat()
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        # Reading a pipe or a device may never end.
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file but a pipe, a device or a folder"
        size = status.st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    return ""


def find_content_problem(folder: Path, expected: dict[str, FileRecord], names: Sequence[str]) -> str:
    """Return the first of these files whose contents differ from the manifest as a message; empty if none does."""
    try:
        records = hash_files(folder, names)
    except OSError as error:
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror})"
    wrong = sorted(name for name in names if records[name] != expected[name])
    return f"{wrong[0]} has other content than was written (SHA-256 differs)" if wrong else ""


_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    "collections": "OrderedDict",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    f"{_DCP}.filesystem": "_StorageInfo",
    f"{_DCP}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_DCP}.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
}
"""Module -> names of its classes and constants in a ``.metadata`` file."""


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that only allows the classes of a ``.metadata`` file."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def check_metadata(checkpoint: Path) -> None:
    """Check ``.metadata`` by unpickling it; torch would log a traceback for an unreadable one."""
    with (checkpoint / ".metadata").open("rb") as file:
        try:
            metadata = MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, OSError):
            raise
        # A damaged pickle can raise any exception.
        except Exception as error:
            raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__} instead of a checkpoint's metadata")


class _RestrictedPickle:
    """Replacement of the module ``pickle`` where torch reads ``.metadata``."""

    @staticmethod
    def load(file: IO[bytes]) -> Any:
        return MetadataUnpickler(file).load()

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict all loading by torch and Megatron in the block to tensors and plain values."""
    # Megatron calls torch.load with weights_only=False; this variable overrides it.
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    module = filesystem.pickle  # type: ignore[attr-defined]
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
