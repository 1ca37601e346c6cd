"""Inference servers as processes of this one: started together, watched, ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.serving.command import ServerPlan
from megatron_dppo.serving.health import is_healthy

_POLL_SECONDS = 0.5
_END_SECONDS = 20.0
_TAIL_LINES = 30


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


@dataclass
class _Server:
    plan: ServerPlan
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises ServerError when the process has ended, with the end of its log."""
        code = self.process.poll()
        if code is not None:
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            raise ServerError(self.plan.url, f"the server has ended ({how}). The end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its output, without keys."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
        for secret in self.plan.secrets:
            text = text.replace(secret, "***")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-_TAIL_LINES:])


class ServerGroup:
    """The servers of this machine; a context manager that leaves none behind.

    Args:
        plans: one for each server.
        log_dir: folder for ``server_0.log`` and so on; what servers print may hold keys, so the files are private.
    """

    def __init__(self, plans: Sequence[ServerPlan], log_dir: Path) -> None:
        self._plans, self._log_dir = plans, log_dir
        self._servers: list[_Server] = []

    def __enter__(self) -> ServerGroup:
        self._files = tempfile.TemporaryDirectory(prefix="megatron_dppo_serve_")  # only for this user
        try:
            for plan in self._plans:
                _require_free(plan.url)
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for index, plan in enumerate(self._plans):
                self._servers.append(self._start(index, plan))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _start(self, index: int, plan: ServerPlan) -> _Server:
        argv = list(plan.argv)
        if plan.config_file:
            file = Path(self._files.name) / f"server_{index}.yaml"
            file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in plan.config_file.items()))
            argv += ["--config", str(file)]
        log = self._log_dir / f"server_{index}.log"
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | plan.env,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"rollout.servers.command = {argv[0]!r} cannot be started: {error.strerror}; expected a program "
                    "in PATH, or a path beside the TOML file or from here"
                ) from error
        return _Server(plan, process, log)

    def wait_healthy(self, stop: StopRequest, timeout: float, say: Callable[[str], None]) -> bool:
        """Wait for /health of each; False = asked to stop before that.

        Raises:
            ServerError: one has ended, or needs more than ``timeout`` seconds.
        """
        end, waiting = time.monotonic() + timeout, list(self._servers)
        while waiting and not stop.due:
            self._check()
            for server in list(waiting):
                if is_healthy(server.plan.url, server.plan.secrets[0] if server.plan.secrets else None):
                    waiting.remove(server)
                    say(f"{server.plan.url} is healthy")
                elif time.monotonic() > end:
                    raise ServerError(
                        server.plan.url,
                        f"not healthy after {timeout:g} seconds (--start-timeout). The end of {server.log}:\n"
                        f"{server.tail()}",
                    )
            time.sleep(_POLL_SECONDS)
        return not waiting

    def watch(self, stop: StopRequest) -> None:
        """Wait until asked to stop.

        Raises:
            ServerError: a server has ended; the others still run.
        """
        while not stop.due:
            self._check()
            time.sleep(_POLL_SECONDS)

    @property
    def logs(self) -> list[Path]:
        """Where each server prints."""
        return [server.log for server in self._servers]

    def _check(self) -> None:
        for server in self._servers:
            server.check()

    def _end(self) -> None:
        """SIGINT to each launcher, whose children go with it; SIGKILL to the session of what does not obey."""
        with _signals_wait():
            for server in self._servers:
                if server.process.poll() is None:
                    server.process.send_signal(signal.SIGINT)
            end = time.monotonic() + _END_SECONDS
            for server in self._servers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(max(0.0, end - time.monotonic()))
                # Also after a launcher that obeyed: it may have left children.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
            self._files.cleanup()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Keep a second SIGINT or SIGTERM from leaving servers behind."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _require_free(url: str) -> None:
    """Refuse an address that is taken: the server behind it would answer in the place of ours."""
    host, port = str(urlsplit(url).hostname), urlsplit(url).port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"rollout.servers.host = {host!r}, port {port} cannot be used: {error.strerror}. If a server of yours runs "
            "there, name it in rollout.servers.urls; otherwise set rollout.servers.port, or host to an address of this "
            "machine"
        ) from error
