"""Run an untrusted Python program: no network, a root of its own, resource limits, and a guaranteed end."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from megatron_dppo_answers.process_tree import kill_process_tree

_PYTHON_FLAGS = ("-I", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
"""Isolated, and with integers of any length, as in the harness of LiveCodeBench; the time limit ends long ones."""
_LAUNCHER = Path(__file__).parent / "sandboxed" / "launcher.py"
_SETUP_SECONDS = 20.0
"""Time limit in seconds from the start of the launcher to the start of the program."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin")
"""System folders that an interpreter needs."""


class SandboxError(Exception):
    """The sandbox itself could not be set up. The program is not at fault."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of one run."""

    seconds: float = 5.0
    """Wall time in seconds. CPU time has the same limit, rounded up."""
    memory_mb: int = 1024
    """Address space of each process in megabytes."""
    disk_mb: int = 64
    """Space that it may write, in megabytes. It is kept in memory."""
    processes: int = 16
    """Number of processes and threads."""
    open_files: int = 64
    """Number of open files per process."""
    output_kb: int = 1024
    """Size of its output in kilobytes."""


@dataclass(frozen=True)
class Sandbox:
    """Settings of a sandbox."""

    python: str
    """Path of the interpreter."""
    visible: tuple[str, ...]
    """Folders that the interpreter needs."""
    namespaces: bool
    """True to isolate with user namespaces, False for resource limits only."""
    network: bool
    """True to allow the network."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ProgramExit:
    """Result of a program."""

    code: int | None
    """Exit code; 128 + N after signal N. None if it was killed at a limit."""
    output: str
    """Text of its standard output."""
    problem: str = ""
    """Limit at which it was killed. Empty if it exited itself."""


class RunningProgram:
    """A started program.

    Args:
        sandbox: Settings.
        files: Text by name, in the folder that the program starts in. The first one is the program.
        arguments: Arguments of the program.
        stdin: Standard input: text or a file descriptor.
        stdout: File descriptor for the output. None collects it in ``ProgramExit.output``.
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
        self._status, launcher_status = os.pipe()
        is_text = isinstance(stdin, str)
        job = {
            "root": self._folder.name,
            "visible": sandbox.visible,
            "namespaces": sandbox.namespaces,
            "network": sandbox.network,
            "files": {**files, "stdin": stdin if is_text else ""},
            "stdin_file": "stdin",
            "stdin_fd": None if is_text else stdin,
            "stdout_fd": stdout,
            "argv": [sandbox.python, *_PYTHON_FLAGS, next(iter(files)), *arguments],
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            "cpu_seconds": int(self._limits.seconds) + 1,
            **vars(self._limits),
        }
        inherited = [fd for fd in (launcher_status, stdin, stdout) if isinstance(fd, int)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), str(launcher_status)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=inherited,
            start_new_session=True,
        )
        os.close(launcher_status)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(job).encode())

    def finish(self) -> ProgramExit:
        """Wait for the program or its limits, and remove everything that it leaves.

        Raises:
            SandboxError: The program was never started.
        """
        try:
            return self._finish()
        finally:
            self.kill()

    @property
    def was_started(self) -> bool:
        """True if the program runs or has run; for programs without a call of ``finish``."""
        # The pipe holds a byte if the launcher has written "ready".
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._status, 1))
        return False

    def kill(self) -> None:
        """Kill the program and everything that it started."""
        kill_process_tree(self._process)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        self._folder.cleanup()

    def _finish(self) -> ProgramExit:
        assert self._process.stdout is not None and self._process.stderr is not None
        output = bytearray()
        status = bytearray()
        errors = bytearray()
        buffers = {self._process.stdout.fileno(): output, self._status: status, self._process.stderr.fileno(): errors}
        deadline = time.monotonic() + _SETUP_SECONDS
        has_started = False
        max_output = self._limits.output_kb << 10
        with selectors.DefaultSelector() as selector:
            for descriptor in buffers:
                selector.register(descriptor, selectors.EVENT_READ)
            # The launcher writes "ready" to the status pipe at the program's start, and closes it at its own end.
            while self._status in selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    if has_started:
                        return ProgramExit(None, _text(output), f"ran for more than {self._limits.seconds:g} s")
                    raise SandboxError(f"not set up after {_SETUP_SECONDS:g} s: {_text(errors)}")
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    buffers[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                if len(output) > max_output:
                    text = _text(output[:max_output])
                    return ProgramExit(None, text, f"wrote more than {self._limits.output_kb} KiB")
                if status and not has_started:
                    has_started = True
                    deadline = time.monotonic() + self._limits.seconds
        # The launcher has ended, so the pipe holds all output. Only a daemon could still write, so do not wait.
        os.set_blocking(self._process.stdout.fileno(), False)
        while len(output) <= max_output and (data := self._process.stdout.read(1 << 16)):
            output += data
        if not status:
            raise SandboxError(_text(errors) or "the launcher ended early")
        return ProgramExit(self._process.wait(), _text(output[:max_output]))


def _text(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", "replace")


@cache
def interpreter(python: str) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter for programs, and the folders that it needs.

    Args:
        python: Path. Empty selects the interpreter of this process, without the packages of its environment.

    Raises:
        SandboxError: The interpreter does not run.
    """
    # In a virtual environment: the interpreter that it was made from.
    path = python or getattr(sys, "_base_executable", sys.executable)
    command = [path, "-I", "-c", "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{path} does not run: {error}") from error
    prefixes = {os.path.realpath(prefix) for prefix in json.loads(done.stdout)}
    outside = sorted(prefix for prefix in prefixes if not prefix.startswith(("/usr/", "/bin/")) and prefix != "/usr")
    return path, (*(folder for folder in _SYSTEM if os.path.exists(folder)), *outside)


_PROBE_SECONDS = 60.0
"""Time for a test program. A crowded machine that takes longer than a user's limit still has namespaces."""


def probe(sandbox: Sandbox) -> str:
    """Return the reason why the sandbox cannot run a program, or an empty string if it can."""
    sandbox = replace(sandbox, limits=replace(sandbox.limits, seconds=_PROBE_SECONDS))
    try:
        result = RunningProgram(sandbox, {"main.py": "print(6 * 7)"}).finish()
    except SandboxError as error:
        return str(error)
    return "" if (result.code, result.output) == (0, "42\n") else f"a test program ended with {result}"
