"""Run a Python program that nobody trusts: no network, its own root, limits, and an end of all that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megatron_dppo.rewards.process_family import end_family

_LAUNCHER = Path(__file__).parent / "sandboxed" / "launcher.py"
_SETUP_SECONDS = 20.0
"""From the start of the launcher to that of the program."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")


class SandboxError(Exception):
    """The sandbox itself could not be set up; this says nothing about the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one run."""

    seconds: float = 5.0
    """wall time; the same of CPU time, rounded up"""
    memory_mb: int = 1024
    """address space of each process"""
    disk_mb: int = 64
    """what it may write, which is kept in memory"""
    processes: int = 16
    """with threads"""
    open_files: int = 64
    output_kb: int = 1024


@dataclass(frozen=True)
class Sandbox:
    """How programs are run."""

    python: str
    """the interpreter"""
    visible: tuple[str, ...]
    """folders that it needs"""
    namespaces: bool
    network: bool
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ProgramExit:
    """A run that is over."""

    code: int | None
    """exit code of the program, 128 + N after signal N; None = it was ended from outside"""
    output: str
    """what it wrote to its output"""
    problem: str = ""
    """why it was ended"""


class RunningProgram:
    """A program that was started.

    Args:
        sandbox: how.
        files: text by name, in the folder that the program starts in; the first is the program.
        arguments: of the program.
        stdin: its input, text or a file descriptor.
        stdout: where its output goes; None = into ``ProgramExit.output``.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        files: Mapping[str, str],
        arguments: Sequence[str] = (),
        stdin: str | int = "",
        stdout: int | None = None,
    ) -> None:
        self._limits = sandbox.limits
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        self._status, theirs = os.pipe()
        has_fd = isinstance(stdin, int)
        job = {
            "root": self._folder.name,
            "visible": sandbox.visible,
            "namespaces": sandbox.namespaces,
            "network": sandbox.network,
            "files": {**files, "stdin": "" if has_fd else stdin},
            "stdin_file": "stdin",
            "stdin_fd": stdin if has_fd else None,
            "stdout_fd": stdout,
            "argv": [sandbox.python, "-I", "-B", "-X", "utf8", next(iter(files)), *arguments],
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            "memory_mb": self._limits.memory_mb,
            "disk_mb": self._limits.disk_mb,
            "processes": self._limits.processes,
            "open_files": self._limits.open_files,
            "cpu_seconds": int(self._limits.seconds) + 1,
        }
        passed = [theirs, *([stdin] if isinstance(stdin, int) else []), *([] if stdout is None else [stdout])]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=passed,
            start_new_session=True,
        )
        os.close(theirs)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(job).encode())

    def finish(self) -> ProgramExit:
        """Wait for the program, or for its limits; nothing of it is left then.

        Raises:
            SandboxError: the program was never started.
        """
        try:
            return self._finish()
        finally:
            self.end()

    @property
    def was_started(self) -> bool:
        """Whether the program runs or has run; for one that ``finish`` is not called of."""
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._status, 1))
        return False

    def end(self) -> None:
        """End it, if it still runs, with all that it has started."""
        end_family(_AsProcess(self._process))
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        self._folder.cleanup()

    def _finish(self) -> ProgramExit:
        assert self._process.stdout is not None and self._process.stderr is not None
        output, state, errors = bytearray(), bytearray(), bytearray()
        kept = {self._process.stdout.fileno(): output, self._status: state, self._process.stderr.fileno(): errors}
        end, started, longest = time.monotonic() + _SETUP_SECONDS, False, self._limits.output_kb << 10
        with selectors.DefaultSelector() as selector:
            for descriptor in kept:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._status in selector.get_map():
                found = selector.select(max(0.0, end - time.monotonic()))
                if not found:
                    if started:
                        return ProgramExit(None, _text(output), f"ran for more than {self._limits.seconds:g} s")
                    raise SandboxError(f"not set up after {_SETUP_SECONDS:g} s: {_text(errors)}")
                for key, _ in found:
                    data = os.read(key.fd, 1 << 16)
                    kept[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                if len(output) > longest:
                    return ProgramExit(None, _text(output[:longest]), f"wrote more than {self._limits.output_kb} KiB")
                if state and not started:
                    started, end = True, time.monotonic() + self._limits.seconds
        # The launcher has ended, so that what is in the pipe is all there is, but for what a daemon writes.
        os.set_blocking(self._process.stdout.fileno(), False)
        while len(output) <= longest and (data := self._process.stdout.read(1 << 16)):
            output += data
        if not state:
            raise SandboxError(_text(errors) or "the launcher ended early")
        return ProgramExit(self._process.wait(), _text(output[:longest]))


class _AsProcess:
    """A ``Popen`` as multiprocessing's processes look."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int | None = process.pid

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


def _text(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", "replace")


@cache
def interpreter(python: str) -> tuple[str, tuple[str, ...]]:
    """The interpreter to run programs with, and the folders that it needs.

    Args:
        python: a path; empty = the one that this process runs on, without what is installed into its environment.

    Raises:
        SandboxError: it does not run.
    """
    path = python or getattr(sys, "_base_executable", sys.executable)
    command = [path, "-I", "-c", "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{path} does not run: {error}") from error
    places = {os.path.realpath(place) for place in json.loads(done.stdout)}
    outside = sorted(place for place in places if not place.startswith(("/usr/", "/bin/")) and place != "/usr")
    return path, (*(place for place in _SYSTEM if os.path.exists(place)), *outside)


def probe(sandbox: Sandbox) -> str:
    """Why the sandbox cannot run a program; empty = it can."""
    try:
        ended = RunningProgram(sandbox, {"main.py": "print(6 * 7)"}).finish()
    except SandboxError as error:
        return str(error)
    return "" if (ended.code, ended.output) == (0, "42\n") else f"a program ended with {ended}"
