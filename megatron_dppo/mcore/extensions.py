"""C++ extensions that Megatron compiles at run time, built once a machine, early and within a time limit.

Megatron Core 0.17 and newer restores outputs in backward by a small extension (``share_storage_ext``, for the
``recompute_modules`` in ``MODULES``). It calls torch's ``load_inline``, which compiles behind a lock file that does not
name its owner and outlives it: after a compiling process is killed, every later process waits without end.

``load_extension`` takes its place. It compiles in a new folder, in a process of its own with a time limit, and renames
the folder when the library is complete. Other processes of this package wait for the builder's ``flock``, which the
kernel releases when the builder dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import ExtensionError
from megatron_dppo.files import try_lock

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

MODULES = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")
"""Entries of ``recompute_modules`` whose recomputation needs the extension."""
INSTALL_TOOLS = "Install g++, ninja and the Python header files (on Debian: g++, ninja-build, python3-dev)"
BUILD_SECONDS = 600.0
"""Time limit of one build. It takes 19 s on an idle core."""
WAIT_SECONDS = 660.0
"""Time limit of waiting for another process's build: longer than the build's own limit."""
_NAME = "share_storage_ext"
_POLL_SECONDS = 0.1
_CHOOSE_FOLDER = "Set TORCH_EXTENSIONS_DIR to a folder that this user can write to"
_BUILD = """
import json, os, sys
from torch.utils.cpp_extension import load_inline
folder = sys.argv[1]
load_inline(**json.load(sys.stdin), build_directory=folder)
os.rename(folder, sys.argv[2])
"""


def needs_extension(config: TransformerConfig) -> bool:
    """Return whether a run with this configuration compiles the extension."""
    from megatron.core.tensor_parallel import random

    is_selective = config.recompute_granularity == "selective"
    uses_it = is_selective and not set(MODULES).isdisjoint(config.recompute_modules or ())
    return uses_it and hasattr(random, "_get_share_storage")


def prepare_extensions(config: TransformerConfig) -> None:
    """Build and load the extension that the configuration needs, before the first step does."""
    if needs_extension(config):
        from megatron.core.tensor_parallel import random

        random._get_share_storage()


def check_build_tools(config: TransformerConfig) -> None:
    """Check that this machine can compile the extension that the configuration needs, or has compiled it before."""
    if needs_extension(config) and not any(_cache_folder().glob(f"{_NAME}-*/{_NAME}.so")):
        _require_build_tools(_NAME)


def replace_load_inline() -> None:
    """Make Megatron's recomputation load its extension by ``load_extension``."""
    from megatron.core.tensor_parallel import random

    if hasattr(random, "load_inline"):
        random.load_inline = load_extension


def missing_build_tools() -> list[str]:
    """Return the names of what this machine lacks to compile an extension; empty if it has all of it."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    present = {
        f"a C++ compiler ({compiler})": shutil.which(compiler) is not None,
        "ninja": shutil.which("ninja", path=_search_path()) is not None,
        f"Python's header files ({header})": header.exists(),
    }
    return [name for name, is_present in present.items() if not is_present]


def load_extension(name: str, cpp_sources: str, functions: list[str] | None = None, **options: Any) -> ModuleType:
    """Return the extension, compiled by whichever process needs it first; an ExtensionError if that fails.

    The arguments are those of ``torch.utils.cpp_extension.load_inline`` that JSON can hold.
    """
    request = {"name": name, "cpp_sources": cpp_sources, "functions": functions} | options
    folder = _cache_folder() / f"{name}-{_digest(request)}"
    if not folder.exists():
        with _sole_builder(folder) as lock:
            if not folder.exists():
                _remove_unfinished(folder)
                _build(request, folder, lock)
    return _import(name, folder / f"{name}.so")


def _cache_folder() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "megatron_dppo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExtensionError(f"{folder} cannot be created: {error.strerror}. {_CHOOSE_FOLDER}") from error
    return folder


def _digest(request: dict[str, Any]) -> str:
    """Return a key of everything that the library depends on."""
    import torch

    parts = [request, torch.__version__, sys.implementation.cache_tag, platform.machine(), os.environ.get("CXX")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _search_path() -> str:
    """Return PATH with this environment's folder of programs, which an environment that is not active lacks."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


@contextmanager
def _sole_builder(folder: Path) -> Iterator[int]:
    """Hold the lock of a build; yields its file descriptor.

    Where the file system has no locks, several processes build at once: each in its own folder, and one rename wins.
    """
    path = folder.with_suffix(".lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ExtensionError(f"{path} cannot be opened: {error.strerror}. {_CHOOSE_FOLDER}") from error
    try:
        _acquire(lock, path)
        yield lock
    finally:
        os.close(lock)


def _acquire(lock: int, path: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not try_lock(lock, fcntl.flock):
        if time.monotonic() > end:
            owner = os.pread(lock, 1024, 0).decode(errors="replace").strip() or "another process"
            raise ExtensionError(
                f"{path} is held by {owner}, which has compiled a C++ extension for more than {WAIT_SECONDS:.0f} s; "
                "expected the compiler to finish. End that process: its lock goes with it. Or set TORCH_EXTENSIONS_DIR "
                "to another folder"
            )
        time.sleep(_POLL_SECONDS)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}".encode(), 0)


def _remove_unfinished(folder: Path) -> None:
    """Delete what builders left that were killed; the caller holds the lock, so none of them is alive."""
    for left in folder.parent.glob(f"{folder.name}.build-*"):
        lock = left / "lock"
        held = f", with torch's lock {lock}" if lock.exists() else ""
        print(f"build    {left} is left by a build that was killed{held}; removing it", flush=True)
        shutil.rmtree(left, ignore_errors=True)


def _require_build_tools(name: str) -> None:
    if missing := missing_build_tools():
        raise ExtensionError(
            f"the C++ extension {name} must be compiled, and this machine lacks {', '.join(missing)}. {INSTALL_TOOLS}, "
            f"or leave {', '.join(MODULES)} out of model.transformer.recompute_modules"
        )


def _build(request: dict[str, Any], folder: Path, lock: int) -> None:
    """Compile in a process of its own and rename the result to ``folder``.

    The child inherits the lock: when this process is killed, the child still finishes as the sole builder.
    """
    _require_build_tools(request["name"])
    print(f"build    compiling {request['name']} into {folder} (about 20 s)", flush=True)
    unfinished = tempfile.mkdtemp(prefix=f"{folder.name}.build-", dir=folder.parent)
    builder = subprocess.Popen(
        [sys.executable, "-P", "-c", _BUILD, unfinished, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": _search_path()},
        text=True,
        pass_fds=[lock],
        start_new_session=True,
    )
    try:
        output, _ = builder.communicate(json.dumps(request), timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ExtensionError(
            f"compiling the C++ extension {request['name']} in {unfinished} took more than {BUILD_SECONDS:.0f} s and "
            "was stopped; expected about 20 s. Check this machine's load and the file system of TORCH_EXTENSIONS_DIR"
        ) from error
    finally:
        # Until its pipe ends, the builder or a compiler of its group runs.
        if builder.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(builder.pid, signal.SIGKILL)
            builder.wait()
        shutil.rmtree(unfinished, ignore_errors=True)
    if not folder.exists():
        raise ExtensionError(f"the C++ extension {request['name']} cannot be compiled:\n{output[-4000:]}")


def _import(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None, library
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ExtensionError(
            f"{library} cannot be loaded: {error}. Delete {library.parent}: the next run compiles it again"
        ) from error
    return module
