"""The inference servers of this machine: started together, watched, each started again when it dies, ended together."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron_dppo.engines.serving.command import ServerPlan
from megatron_dppo.engines.serving.server_process import ServerProcess, require_free

_POLL_SECONDS = 0.5


_HEALTH_SECONDS = 5.0
"""Limit of one question to a server that was started again: signals and the other servers wait meanwhile."""


_END_SECONDS = 20.0


TRIES = 3
"""Times in a row that a dead server is started again without becoming healthy."""


class StopRequest:
    """SIGTERM, SIGINT and SIGHUP as a request to end the servers.

    Args:
        grace: seconds that servers go on after the first SIGTERM. A scheduler that takes the machines back signals
            servers and trainer together; a trainer that finishes its step needs them until then. A second signal, or
            another one, ends them at once.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self._grace, self._end = grace, float("inf")

    def __enter__(self) -> StopRequest:
        self._previous = {
            number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first_term = number == signal.SIGTERM and self._end == float("inf")
        self._end = time.monotonic() + (self._grace if is_first_term else 0.0)

    @property
    def due(self) -> bool:
        """Whether the servers are to end now."""
        return time.monotonic() >= self._end


class ServerGroup:
    """The servers of this machine; a context manager that leaves none behind.

    Args:
        plans: one for each server.
        log_dir: folder for ``server_0.log`` and so on.
        start_timeout: seconds until a server that was started is healthy.
        say: tells the user what happens.
    """

    def __init__(
        self, plans: Sequence[ServerPlan], log_dir: Path, start_timeout: float, say: Callable[[str], None]
    ) -> None:
        self._plans, self._log_dir, self._start_timeout, self._say = plans, log_dir, start_timeout, say
        self._servers: list[_Watched] = []

    def __enter__(self) -> ServerGroup:
        self._files = tempfile.TemporaryDirectory(prefix="megatron_dppo_serve_")  # only for this user
        try:
            for plan in self._plans:
                require_free(plan.url)
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for index, plan in enumerate(self._plans):
                log, file = self._log_dir / f"server_{index}.log", Path(self._files.name) / f"server_{index}.yaml"
                self._say(f"starting {plan.url}, its output is in {log}")
                self._servers.append(_Watched(ServerProcess(plan, log, file), self._start_timeout, self._say))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def wait_healthy(self, stop: StopRequest) -> bool:
        """Wait for /health of each; False = asked to stop before that.

        Raises:
            ServerError: one has ended, or needs more than ``start_timeout`` seconds. At the first start none is
                started again: it would most likely end for the same reason.
        """
        while (starting := [server for server in self._servers if not server.healthy]) and not stop.due:
            for server in self._servers:
                server.require_running()
            for server in starting:
                server.look()
            time.sleep(_POLL_SECONDS)
        return not starting

    def watch(self, stop: StopRequest) -> None:
        """Start servers that die again, with the same arguments, until asked to stop.

        Raises:
            ServerError: one has died without having become healthy in ``TRIES`` starts in a row; the others still run.
            ConfigError: its program is gone.
        """
        while not stop.due:
            for server in self._servers:
                server.keep_running()
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        """Ask each to end; kill what does not obey."""
        with _signals_wait():
            for server in self._servers:
                server.process.interrupt()
            end = time.monotonic() + _END_SECONDS
            for server in self._servers:
                server.process.wait(end - time.monotonic())
                server.process.kill()
            self._files.cleanup()


class _Watched:
    """A server, and how its starts went."""

    def __init__(self, process: ServerProcess, start_timeout: float, say: Callable[[str], None]) -> None:
        self.process, self._timeout, self._say = process, start_timeout, say
        self.healthy = False
        """whether it was, since it was started last"""
        self._tries = 0
        """starts after its death, since it was healthy last"""
        self._started = time.monotonic()

    def require_running(self) -> None:
        """Raises ServerError when the process has ended, or has not become healthy in its time."""
        if (problem := self._problem()) is not None:
            raise self.process.error(problem)

    def keep_running(self) -> None:
        """Look at it, and start it again where it has ended or does not become healthy."""
        if (problem := self._problem()) is not None:
            self._start_again(problem)
        elif not self.healthy:
            self.look()

    def look(self) -> None:
        """Note whether it is healthy now."""
        if self.process.is_healthy(_HEALTH_SECONDS):
            self.healthy, self._tries = True, 0
            self._say(f"{self.process.plan.url} is healthy")

    def _problem(self) -> str | None:
        if (how := self.process.ended()) is not None:
            return f"the server has ended ({how})"
        if not self.healthy and time.monotonic() > self._started + self._timeout:
            return f"not healthy after {self._timeout:g} seconds (--start-timeout)"
        return None

    def _start_again(self, problem: str) -> None:
        if self._tries == TRIES:
            raise self.process.error(f"{problem}, as in {TRIES} starts before without having become healthy")
        self._tries += 1
        self._say(
            f"{self.process.plan.url}: {problem}; it is started again (try {self._tries} of {TRIES} to become "
            f"healthy), and its output goes on in {self.process.log}"
        )
        self.process.start_again()
        self.healthy, self._started = False, time.monotonic()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Keep a second SIGINT or SIGTERM from leaving servers behind."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them; empty = none."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA stops at the first entry that is no device; -1 is the usual one.
        parts = [part.strip() for part in named.split(",") if part.strip()]
        return parts[: parts.index("-1")] if "-1" in parts else parts
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()
