"""One inference server as a child process: start, health, restart and end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dppo_engines.errors import ConfigError, ServerError
from megatron_dppo_engines.serving.checks import is_healthy

_TAIL_LINES = 30
_TAIL_BYTES = 16384
_CONNECT_SECONDS = 5.0
_PORT_SECONDS = 20.0
"""Time that a restart waits for the port of the dead server to become free."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Command line and environment of one server, or of its part on this node."""

    url: str
    """Its address. That of node 0 for a part that does not listen."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that are added to this process's environment."""
    config_file: dict[str, str] = field(default_factory=dict, repr=False)
    """Options that must not appear in the process list; they are passed in a file, as ``--config FILE``."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """API keys, which are masked when a part of the log is shown."""
    listens: bool = True
    """False for the other nodes of a vLLM server, which answer no requests: it is healthy when node 0 is."""


class ServerProcess:
    """A server process; the constructor starts it, and raises ``ConfigError`` if its program does not exist.

    Servers may print keys, so only this user can read the log, to which the output is appended.
    """

    def __init__(self, plan: ServerPlan, log: Path, secrets_file: Path) -> None:
        self.plan = plan
        self.log = log
        self._secrets_file = secrets_file
        self._process = self._start()

    def restart(self) -> None:
        """Kill what is left of the server, and start it again in the same way."""
        self.kill()
        end = time.monotonic() + _PORT_SECONDS
        while self.plan.listens and not _is_free(self.plan.url) and time.monotonic() < end:
            time.sleep(0.1)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        argv = list(self.plan.argv)
        if self.plan.config_file:
            lines = (f"{name}: {json.dumps(value)}\n" for name, value in self.plan.config_file.items())
            # Every user of the machine can read a command line, so keys go to a file.
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
                    # A session of its own: Ctrl-C in the terminal reaches this program only, and ``kill`` reaches all
                    # children.
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"rollout.servers.command = {argv[0]!r} cannot be started: {error.strerror}; expected a program "
                    "in PATH, or a path beside the TOML file or from here"
                ) from error

    def exit_status(self) -> str | None:
        """Return the exit code or signal in words; None if the server is running."""
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def is_healthy(self, timeout: float) -> bool:
        """Return True if /health responds within ``timeout`` seconds."""
        return is_healthy(self.plan.url, self.plan.secrets[0] if self.plan.secrets else None, timeout=timeout)

    def error(self, problem: str) -> ServerError:
        """Return an error that names the server and shows the last lines of its output, with keys masked."""
        return ServerError(self.plan.url, f"{problem}. Last lines of {self.log}:\n{self._tail()}")

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        for secret in self.plan.secrets:
            text = text.replace(secret, "***")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-_TAIL_LINES:])

    def interrupt(self) -> None:
        """Send SIGINT to the launcher, which ends its children."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the server has exited."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def kill(self) -> None:
        """Send SIGKILL to the session, also if the launcher has exited: it may have left children behind."""
        with contextlib.suppress(ProcessLookupError):
            # The launcher leads a session, so its pid is the group of all its children.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def require_free(url: str) -> None:
    """Check that an address is free: a server that runs there would respond in place of the new one."""
    try:
        _bind(url)
    except OSError as error:
        address = urlsplit(url)
        raise ConfigError(
            f"rollout.servers.host = {str(address.hostname)!r}, port {address.port} cannot be used: {error.strerror}. "
            "If your own server runs there, name it in rollout.servers.urls; otherwise set rollout.servers.port, or "
            "host to an address of this machine"
        ) from error


def refuses_connections(url: str) -> bool:
    """Return True if nothing listens at an address. A host that does not answer at all gives False."""
    address = urlsplit(url)
    try:
        with socket.create_connection((str(address.hostname), address.port), timeout=_CONNECT_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _is_free(url: str) -> bool:
    try:
        _bind(url)
    except OSError:
        return False
    return True


def _bind(url: str) -> None:
    """Bind a socket to an address, and close it; ``OSError`` if the address cannot be used."""
    host = str(urlsplit(url).hostname)
    port = urlsplit(url).port
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connections of the server before, in TIME_WAIT, do not keep its successor from the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
