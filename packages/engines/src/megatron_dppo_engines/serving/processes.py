"""The inference servers of this machine: started together, supervised, restarted when they die, ended together."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron_dppo_engines.serving.server_process import ServerPlan, ServerProcess, refuses_connections, require_free

_POLL_SECONDS = 0.5
_HEALTH_SECONDS = 5.0
"""Limit of one health check of a server that was restarted: signals and the other servers wait meanwhile."""
EXIT_SECONDS = 20.0
"""Time that all servers together get to exit before they are killed."""
MAX_RESTARTS = 3
"""Restarts of a dead server in a row without becoming healthy."""


class StopRequest:
    """Request to end the servers, by SIGTERM, SIGINT or SIGHUP.

    Args:
        grace: Seconds that servers continue after the first SIGTERM. A scheduler that reclaims the machines signals
            servers and trainer together, and a trainer that finishes its step needs the servers until then. A second
            signal, or another one, ends them at once.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self._grace = grace
        self._end = float("inf")

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
    def is_due(self) -> bool:
        """True if the servers must end now."""
        return time.monotonic() >= self._end


class ServerGroup:
    """The servers of this machine; a context manager that leaves none behind."""

    def __init__(
        self, plans: Sequence[ServerPlan], log_dir: Path, start_timeout: float, log: Callable[[str], None]
    ) -> None:
        self._plans = plans
        self._log_dir = log_dir
        self._start_timeout = start_timeout
        self._log = log
        self._servers: list[_SupervisedServer] = []

    def __enter__(self) -> ServerGroup:
        self._files = tempfile.TemporaryDirectory(prefix="megatron_dppo_serve_")  # readable only by this user
        try:
            # All before the first start, so that a port in use shows at once.
            for plan in self._plans:
                if plan.listens:
                    require_free(plan.url)
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for index, plan in enumerate(self._plans):
                log_file = self._log_dir / f"server_{index}.log"
                secrets_file = Path(self._files.name) / f"server_{index}.yaml"
                self._log(f"starting {plan.url}, its output is in {log_file}")
                process = ServerProcess(plan, log_file, secrets_file)
                self._servers.append(_SupervisedServer(process, self._start_timeout, self._log))
        except BaseException:
            # ``__exit__`` is not called if ``__enter__`` fails.
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def wait_healthy(self, stop: StopRequest) -> bool:
        """Wait until all servers are healthy; return False if ``stop`` comes first.

        One that exits or is late raises ``ServerError``. At the first start none is restarted: it would most likely
        exit for the same reason.
        """
        while (starting := [server for server in self._servers if not server.is_healthy]) and not stop.is_due:
            for server in self._servers:
                server.require_running()
            for server in starting:
                server.check_health()
            time.sleep(_POLL_SECONDS)
        return not starting

    def watch(self, stop: StopRequest) -> None:
        """Restart servers that die, with the same arguments, until ``stop`` is due.

        One that is not healthy after ``MAX_RESTARTS`` restarts in a row raises ``ServerError``; the others still run.
        """
        while not stop.is_due:
            for server in self._servers:
                server.keep_running()
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        """Interrupt all servers, and kill those that do not exit in time."""
        with _signals_blocked():
            for server in self._servers:
                server.process.interrupt()
            end = time.monotonic() + EXIT_SECONDS
            for server in self._servers:
                server.process.wait(end - time.monotonic())
                server.process.kill()
            self._files.cleanup()


class _SupervisedServer:
    """A server and the history of its starts."""

    def __init__(self, process: ServerProcess, start_timeout: float, log: Callable[[str], None]) -> None:
        self.process = process
        self._timeout = start_timeout
        self._log = log
        self.is_healthy = False
        """True if the server was healthy at some time since its last start."""
        self._restarts = 0
        """Restarts since the server was last healthy."""
        self._started = time.monotonic()
        self._waits_for_node_0 = False

    def require_running(self) -> None:
        """Raise ServerError if the process exited, or did not become healthy in its time."""
        if (problem := self._problem()) is not None:
            raise self.process.error(problem)

    def keep_running(self) -> None:
        """Restart the server if it exited or did not become healthy in its time; otherwise check its health."""
        if (problem := self._problem()) is not None:
            # What is left of the server keeps its group until node 0 has ended too; a new part could not join.
            if self.process.plan.listens or refuses_connections(self.process.plan.url):
                self._restart(problem)
            elif not self._waits_for_node_0:
                self._waits_for_node_0 = True
                self._log(f"{self.process.plan.url}: {problem} on this node; it is restarted when node 0 has ended too")
        elif not self.is_healthy:
            self.check_health()

    def check_health(self) -> None:
        if self.process.is_healthy(_HEALTH_SECONDS):
            self.is_healthy = True
            self._restarts = 0
            self._log(f"{self.process.plan.url} is healthy")

    def _problem(self) -> str | None:
        if (status := self.process.exit_status()) is not None:
            return f"the server exited ({status})"
        if not self.is_healthy and time.monotonic() > self._started + self._timeout:
            return f"not healthy after {self._timeout:g} seconds (--start-timeout)"
        if self.is_healthy and not self.process.plan.listens and refuses_connections(self.process.plan.url):
            # vLLM's other nodes wait forever for a node 0 that has ended.
            return "node 0 of the server ended"
        return None

    def _restart(self, problem: str) -> None:
        if self._restarts == MAX_RESTARTS:
            raise self.process.error(f"{problem}; it did not become healthy in {MAX_RESTARTS} restarts either")
        self._restarts += 1
        self._log(
            f"{self.process.plan.url}: {problem}; restarting it (attempt {self._restarts} of {MAX_RESTARTS}), its "
            f"output continues in {self.process.log}"
        )
        self.process.restart()
        self.is_healthy = False
        self._waits_for_node_0 = False
        self._started = time.monotonic()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP, so that a second signal leaves no servers behind."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES; empty if there are none."""
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        # CUDA stops at the first entry that is no device; -1 is the usual one.
        parts = [part.strip() for part in variable.split(",") if part.strip()]
        return parts[: parts.index("-1")] if "-1" in parts else parts
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split()
