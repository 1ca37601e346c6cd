"""File operations as points: Python's by its audit events and its files, those of native code by their entries."""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.kill_points.points import Points, phase

_EVENTS = {
    "open": "open",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.link": "link",
    "os.symlink": "symlink",
    "os.truncate": "truncate",
}


def install(points: Points) -> None:
    """Instrument this process; there is no way back."""
    sys.addaudithook(functools.partial(_audit, points))
    for name in ("rename", "replace"):
        _wrap_rename(points, name)
    _wrap_fsync(points)
    _wrap_open(points)
    _wrap_native(points)


def _audit(points: Points, event: str, arguments: tuple[Any, ...]) -> None:
    operation = _EVENTS.get(event)
    if operation is None or points.busy:
        return
    directory = arguments[-1] if operation in ("remove", "rmdir", "mkdir") and isinstance(arguments[-1], int) else -1
    path = points.relative(arguments[0], directory)
    target = points.relative(arguments[1]) if operation == "rename" else None
    if path is None:
        return
    if operation == "open":
        operation = "write" if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "read"
    points.point(f"{phase()} | {operation} {path}{' -> ' + target if target else ''} | before")


def _wrap_rename(points: Points, name: str) -> None:
    real = getattr(os, name)

    @functools.wraps(real)
    def wrapper(source: Any, target: Any, **kwargs: Any) -> None:
        old, new = points.relative(source), points.relative(target)
        real(source, target, **kwargs)
        if old is not None and new is not None and not points.busy:
            points.durable.note("R", old, new)
            points.point(f"{phase()} | rename {old} -> {new} | after")

    setattr(os, name, wrapper)


def _wrap_fsync(points: Points) -> None:
    real = os.fsync

    @functools.wraps(real)
    def wrapper(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = None if points.busy else points.relative(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path is not None:
            points.point(f"{phase()} | fsync {path} | before")
        real(file)
        if path is not None:
            points.durable.note("S", path, os.fstat(descriptor).st_size)
            points.point(f"{phase()} | fsync {path} | after")

    os.fsync = wrapper  # type: ignore[assignment]


def _wrap_open(points: Points) -> None:
    real = io.open

    @functools.wraps(real)
    def wrapper(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = None if points.busy or not set(mode) & set("wax+") else points.relative(file)
        if path is None:
            return real(file, mode, *args, **kwargs)
        size = os.path.getsize(file) if "a" in mode and os.path.exists(file) else 0
        opened = real(file, mode, *args, **kwargs)
        points.durable.note("A" if "a" in mode else "W", path, size)
        return _File(opened, points, path)

    io.open = builtins.open = wrapper  # type: ignore[assignment]


class _File:
    """A file that can be left with half of a write in it."""

    def __init__(self, file: Any, points: Points, path: str) -> None:
        self._file, self._points, self._path = file, points, path
        self._writes = 0

    def write(self, data: Any) -> Any:
        self._writes += 1
        # A JSON document comes in hundreds of writes: those whose number is a power of two are points.
        if self._writes & (self._writes - 1) == 0 and self._points.reach(f"{phase()} | write {self._path} | torn"):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._points.die()
        return self._file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def close(self) -> None:
        if not self._file.closed:
            self._points.point(f"{phase()} | close {self._path} | before")
            self._file.close()
            self._points.point(f"{phase()} | close {self._path} | after")

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _wrap_native(points: Points) -> None:
    """Writers in C++ and Rust, which open files without Python."""
    import safetensors.torch
    import torch

    safetensors.torch.serialize_file = _native(points, safetensors.torch.serialize_file)
    torch.save = _native(points, torch.save)


def _native(points: Points, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose second argument may be the path that it writes."""

    @functools.wraps(real)
    def wrapper(content: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        path = points.relative(file)
        if path is None or points.busy:
            return real(content, file, *args, **kwargs)
        points.point(f"{phase()} | write {path} | before")
        points.durable.note("W", path)
        with points.quiet():
            result = real(content, file, *args, **kwargs)
        if points.reach(f"{phase()} | write {path} | torn"):
            points.busy = True
            os.truncate(file, os.path.getsize(file) // 2)
            points.die()
        points.point(f"{phase()} | write {path} | after")
        return result

    return wrapper
