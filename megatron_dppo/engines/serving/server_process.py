"""One inference server as a process of this one: started, looked at, started again, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dppo.engines.serving.checks import is_healthy
from megatron_dppo.engines.serving.command import ServerPlan
from megatron_dppo.errors import ConfigError, ServerError

_TAIL_LINES = 30
_TAIL_BYTES = 16384
_END_SECONDS = 20.0


class ServerProcess:
    """A server that runs from here on.

    Args:
        plan: how it is started.
        log: where it prints; what servers print may hold keys, so the file is private. It is appended to.
        secrets_file: where arguments go that must not be in the process list.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, plan: ServerPlan, log: Path, secrets_file: Path) -> None:
        self.plan, self.log, self._secrets_file = plan, log, secrets_file
        self._process = self._start()

    def start_again(self) -> None:
        """Start it once more, the same way, when nothing of it is left.

        Raises:
            ConfigError: the program is gone.
        """
        self.kill()
        end = time.monotonic() + _END_SECONDS
        while not _is_free(self.plan.url) and time.monotonic() < end:
            time.sleep(0.1)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        argv = list(self.plan.argv)
        if self.plan.config_file:
            lines = (f"{name}: {json.dumps(value)}\n" for name, value in self.plan.config_file.items())
            self._secrets_file.write_text("".join(lines))
            argv += ["--config", str(self._secrets_file)]
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            try:
                return subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self.plan.env,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"rollout.servers.command = {argv[0]!r} cannot be started: {error.strerror}; expected a program "
                    "in PATH, or a path beside the TOML file or from here"
                ) from error

    def ended(self) -> str | None:
        """How it has ended, in words; None = it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def is_healthy(self, timeout: float) -> bool:
        """Whether its /health answers within ``timeout`` seconds."""
        return is_healthy(self.plan.url, self.plan.secrets[0] if self.plan.secrets else None, timeout=timeout)

    def error(self, problem: str) -> ServerError:
        """An error that names the server and shows the last lines of its output, without keys."""
        return ServerError(self.plan.url, f"{problem}. The end of {self.log}:\n{self._tail()}")

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        for secret in self.plan.secrets:
            text = text.replace(secret, "***")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-_TAIL_LINES:])

    def interrupt(self) -> None:
        """Ask it to end: SIGINT to the launcher, whose children go with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Until it has ended, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def kill(self) -> None:
        """SIGKILL to its session: also after a launcher that ended by itself, which may have left children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def require_free(url: str) -> None:
    """Refuse an address that is taken: the server behind it would answer in the place of ours.

    Raises:
        ConfigError: it is, or it is no address of this machine.
    """
    try:
        _bind(url)
    except OSError as error:
        address = urlsplit(url)
        raise ConfigError(
            f"rollout.servers.host = {str(address.hostname)!r}, port {address.port} cannot be used: {error.strerror}. "
            "If a server of yours runs there, name it in rollout.servers.urls; otherwise set rollout.servers.port, or "
            "host to an address of this machine"
        ) from error


def _is_free(url: str) -> bool:
    try:
        _bind(url)
    except OSError:
        return False
    return True


def _bind(url: str) -> None:
    """Take an address and give it back.

    Raises:
        OSError: it cannot be taken.
    """
    host, port = str(urlsplit(url).hostname), urlsplit(url).port
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
