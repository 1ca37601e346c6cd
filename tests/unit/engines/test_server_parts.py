"""Parts of a vLLM server on further nodes: they do not listen, and live as long as node 0."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.serving.processes import ServerGroup
from megatron_dppo_engines.serving.server_process import ServerPlan
from tests.engines.servers import free_port


class Healthy(BaseHTTPRequestHandler):
    """Node 0."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def node_0(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield
        server.shutdown()
        thread.join()


class Until:
    """A stop that is due when a condition holds, at the latest after 30 seconds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition
        self._end = time.monotonic() + 30

    @property
    def is_due(self) -> bool:
        assert time.monotonic() < self._end, "nothing happened"
        return self._condition()


class Part:
    """A part whose process writes a line at each start and ends when the file ``end`` exists."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.log: list[str] = []
        script = (
            "import pathlib, sys, time\n"
            f"folder = pathlib.Path({str(folder)!r})\n"
            "with (folder / 'starts').open('a') as file: file.write('x')\n"
            "while not (folder / 'end').exists(): time.sleep(0.02)\n"
            "(folder / 'end').unlink(); sys.exit(7)\n"
        )
        plan = ServerPlan(url=f"http://127.0.0.1:{self.port}", argv=(sys.executable, "-c", script), listens=False)
        self.group = ServerGroup([plan], folder, 60.0, self.log.append)

    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text()) if file.exists() else 0

    def watch(self, condition: Callable[[], bool]) -> None:
        self.group.watch(Until(condition))  # type: ignore[arg-type]

    def says(self, text: str) -> int:
        return sum(text in line for line in self.log)


def never() -> bool:
    return False


def test_a_part_is_healthy_with_node_0_and_starts_again_after_it(tmp_path: Path) -> None:
    part = Part(tmp_path)
    with part.group:  # that node 0's port is used here, as on another machine, is no error
        with node_0(part.port):
            assert part.group.wait_healthy(Until(never))  # type: ignore[arg-type]
            assert part.says("is healthy") == 1
            end = time.monotonic() + 1.5
            part.watch(lambda: time.monotonic() > end)
            assert part.starts() == 1 and part.says("restarting") == 0
        part.watch(lambda: part.starts() == 2)
        assert part.says("node 0 of the server ended; restarting it (attempt 1 of 3)") == 1
        with node_0(part.port):
            part.watch(lambda: part.says("is healthy") == 2)
        assert part.starts() == 2, "not once more for the same end"


def test_a_part_that_ends_waits_for_the_end_of_node_0(tmp_path: Path) -> None:
    part = Part(tmp_path)
    with part.group:
        with node_0(part.port):
            assert part.group.wait_healthy(Until(never))  # type: ignore[arg-type]
            (tmp_path / "end").touch()
            part.watch(lambda: part.says("restarted when node 0 has ended too") > 0)
            end = time.monotonic() + 1.5
            part.watch(lambda: time.monotonic() > end)
            assert part.starts() == 1 and part.says("(exit code 7) on this node") == 1, part.log
        part.watch(lambda: part.starts() == 2)
        with node_0(part.port):
            part.watch(lambda: part.says("is healthy") == 2)


def test_a_part_that_ends_at_its_first_start_is_an_error(tmp_path: Path) -> None:
    part = Part(tmp_path)
    (tmp_path / "end").touch()
    with part.group, pytest.raises(ServerError, match="exit code 7"):
        part.group.wait_healthy(Until(never))  # type: ignore[arg-type]
