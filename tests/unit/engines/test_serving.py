"""``megatron-dppo serve`` with stand-ins for servers: real processes, real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.serving import processes
from megatron_dppo_engines.serving.checks import is_healthy
from megatron_dppo_engines.serving.server_process import ServerPlan

ROOT = Path(__file__).parents[3]
STUB = Path(__file__).parents[1].joinpath("server_stub.py")
CONFIG = ROOT / "examples/chain_sum/sglang.toml"

LIMIT_SECONDS = 120.0
"""Time after which a wait never ends: no test takes as long on a busy machine."""


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = 0
            for i in range(count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", first + i if i else 0))
                first = first or probe.getsockname()[1]
            return first


class Serve:
    """A running ``megatron-dppo serve`` with stubs."""

    def __init__(self, folder: Path, mode: str, *arguments: str, count: int = 1, **env: str) -> None:
        self.folder, self.port = folder, free_ports(count)
        self.ports = range(self.port, self.port + count)
        command = json.dumps([sys.executable, str(STUB), str(folder), mode])
        self.argv = [sys.executable, "-m", "megatron_dppo.commands.main", "serve", str(CONFIG)]
        self.argv += ["--log-dir", str(folder / "logs"), "--urls-file", str(folder / "urls")]
        self.argv += ["--rollout.servers.command", command, "--rollout.servers.port", str(self.port)]
        self.argv += ["--rollout.servers.count", str(count), *arguments]
        self._output = folder / "output"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                self.argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | env,
            )

    def wait_for_file(self, name: str) -> Path:
        file = self.folder / name
        self._wait_for(file.exists)
        return file

    def wait_for_output(self, text: str, count: int) -> None:
        """Wait until ``serve`` has printed a text so often."""
        self._wait_for(lambda: self._output.read_text().count(text) >= count)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < end
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(LIMIT_SECONDS)
        return code, self._output.read_text()

    def started(self, index: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"started-{self.ports[index]}.json").read_text())

    def surviving_pids(self) -> list[int]:
        """Return the pids of server processes that still run. Orphans are zombies here and do not count."""
        return [p for i in range(len(self.ports)) for p in self.started(i)["pids"] if is_running(p)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    running: list[Serve] = []

    def start(mode: str = "serve", *arguments: str, **options: Any) -> Serve:
        running.append(Serve(tmp_path, mode, *arguments, **options))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()
            one.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_urls_are_written_when_all_servers_are_healthy_and_a_signal_stops_all(
    serve: Any, number: signal.Signals
) -> None:
    running = serve(count=2)
    urls = running.wait_for_file("urls").read_text().split()
    assert urls == [f"http://127.0.0.1:{port}" for port in running.ports]
    assert len(running.surviving_pids()) == 4
    running.process.send_signal(number)
    code, output = running.end()
    assert code == 0 and "stopping the servers" in output
    assert running.surviving_pids() == []


def test_without_a_healthy_server_there_are_no_urls_not_even_old_ones(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("http://old\n")
    code, output = serve("slow", "--start-timeout", "1").end()
    assert code == 2 and "not healthy after 1 seconds (--start-timeout)" in output
    assert not (tmp_path / "urls").exists()


class OneServer:
    """A stub for a ``ServerGroup`` in this process, and a clock that goes on by 100 seconds at each of its late starts.

    Args:
        folder: holds all its files.
        mode: of the stub.
        starts_in_time: the first starts, for which the clock stands still.
    """

    def __init__(self, folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch, starts_in_time: int = 0) -> None:
        port = free_ports(1)
        argv = (sys.executable, str(STUB), str(folder), mode, "--host", "127.0.0.1", "--port", str(port))
        self.plans = [ServerPlan(url=f"http://127.0.0.1:{port}", argv=argv)]
        self._started, self._log = folder / f"started-{port}.json", folder / "server_0.log"
        self._starts, self._seconds = starts_in_time, 0.0
        self._end = time.monotonic() + LIMIT_SECONDS
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self._seconds, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        assert time.monotonic() < self._end, "the group waits for ever"
        time.sleep(0.02)
        starts = self._log.read_text().count("loading")
        if starts > self._starts:
            self._starts = starts
            self._seconds += 100.0

    def is_running(self) -> bool:
        return any(map(is_running, json.loads(self._started.read_text())["pids"]))


def test_a_late_server_is_ended_and_shown_with_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = OneServer(tmp_path, "slow", monkeypatch)
    with (
        pytest.raises(ServerError, match=r"(?s)30 seconds.*\| loading"),
        processes.StopRequest() as stop,
        processes.ServerGroup(late.plans, tmp_path, 30, print) as group,
    ):
        group.wait_healthy(stop)
    wait_for_one(lambda: [] if late.is_running() else [1])


def test_a_server_that_dies_at_startup_is_shown_with_its_last_output(serve: Any) -> None:
    running = serve("die")
    code, output = running.end()
    assert code == 2
    assert f"error: http://127.0.0.1:{running.port}: the server exited (exit code 5)" in output
    assert "  | no such model" in output and "logs/server_0.log" in output


def test_a_dead_server_is_restarted_unchanged_and_the_other_keeps_running(serve: Any) -> None:
    running = serve("die-once", "--rollout.servers.api_key_env", "STUB_KEY", count=2, STUB_KEY="s3cret")
    running.wait_for_file("urls")
    before = [running.started(i) for i in range(2)]
    (running.folder / "die").touch()
    running.wait_for_file("dead")
    dead = wait_for_one(lambda: [i for i in range(2) if running.started(i)["pids"] != before[i]["pids"]])
    url = f"http://127.0.0.1:{running.ports[dead]}"
    wait_for_one(lambda: [1] if is_healthy(url) else [])
    after = [running.started(i) for i in range(2)]
    assert all(after[dead][key] == before[dead][key] for key in ("arguments", "config"))
    assert after[1 - dead]["pids"] == before[1 - dead]["pids"] and all(map(is_running, before[1 - dead]["pids"]))
    assert not any(map(is_running, before[dead]["pids"])), "what the dead launcher had started is left"
    log = (running.folder / f"logs/server_{dead}.log").read_text()
    assert log.count("loading") == 2 and "out of memory" in log
    running.wait_for_output(f"serve: {url} is healthy", 2)
    running.process.terminate()
    code, output = running.end()
    assert code == 0 and "s3cret" not in output and running.surviving_pids() == []
    assert f"serve: {url}: the server exited (exit code 7); restarting it (attempt 1 of 3" in output
    assert output.count(f"serve: {url} is healthy") == 2 and output.count("restarting it") == 1


@pytest.mark.slow
def test_a_server_that_becomes_healthy_is_restarted_without_a_limit(serve: Any) -> None:
    running = serve("die-once")
    running.wait_for_file("urls")
    for restarts in range(1, processes.MAX_RESTARTS + 2):
        (running.folder / "die").touch()
        running.wait_for_output("is healthy", 1 + restarts)
    running.process.terminate()
    code, output = running.end()
    assert code == 0 and output.count("attempt 1 of 3") == processes.MAX_RESTARTS + 1


@pytest.mark.slow
def test_a_server_that_dies_at_each_start_stops_all_and_shows_no_key(serve: Any) -> None:
    running = serve("die-later", "--rollout.servers.api_key_env", "STUB_KEY", count=2, STUB_KEY="s3cret")
    running.wait_for_file("urls")
    (running.folder / "die").touch()
    code, output = running.end()
    assert code == 2 and "exit code 7" in output and "out of memory, key ***" in output
    assert "it did not become healthy in 3 restarts either" in output and "attempt 3 of 3" in output
    assert "s3cret" not in output and running.surviving_pids() == []


@pytest.mark.slow
def test_a_server_that_stays_unhealthy_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = OneServer(tmp_path, "slow-later", monkeypatch, starts_in_time=1)
    with processes.StopRequest() as stop, processes.ServerGroup(server.plans, tmp_path, 30, print) as group:
        assert group.wait_healthy(stop)
        (tmp_path / "die").touch()
        with pytest.raises(ServerError, match=r"30 seconds .* 3 restarts"):
            group.watch(stop)
    wait_for_one(lambda: [] if server.is_running() else [1])


def wait_for_one(found: Callable[[], list[int]]) -> int:
    """The first of what a function gives, when it gives something; half-written files are read again."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(ValueError):
            if values := found():
                return values[0]
        time.sleep(0.05)
    raise AssertionError("nothing came")


def test_a_launcher_that_ignores_sigint_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "EXIT_SECONDS", 1.0)
    port = free_ports(1)
    argv = (sys.executable, str(STUB), str(tmp_path), "stubborn", "--host", "127.0.0.1", "--port", str(port))
    plan = ServerPlan(url=f"http://127.0.0.1:{port}", argv=argv)
    with processes.StopRequest() as stop, processes.ServerGroup([plan], tmp_path, 30, print) as group:
        assert group.wait_healthy(stop)
        pids = json.loads((tmp_path / f"started-{port}.json").read_text())["pids"]
        assert all(map(is_running, pids))
    # The launcher's child is nobody's here: on a busy machine it may take a moment until it is gone.
    end = time.monotonic() + LIMIT_SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a killed launcher leaves processes"
        time.sleep(0.1)


@pytest.mark.slow
def test_grace_survives_a_first_sigterm_and_ends_at_the_second(serve: Any) -> None:
    running = serve("serve", "--grace", "60")
    running.wait_for_file("urls")
    running.process.terminate()
    time.sleep(1.5)
    assert running.process.poll() is None and len(running.surviving_pids()) == 2
    running.process.terminate()
    assert running.end()[0] == 0 and running.surviving_pids() == []


@pytest.mark.slow
def test_a_killed_serve_leaves_no_servers(serve: Any) -> None:
    servers = serve("serve", count=2)
    servers.wait_for_file("urls")
    assert len(servers.surviving_pids()) >= 2
    servers.process.kill()
    end = time.monotonic() + LIMIT_SECONDS
    while servers.surviving_pids():
        assert time.monotonic() < end, "servers outlive serve"
        time.sleep(0.1)


@pytest.mark.slow
def test_grace_times_out(serve: Any) -> None:
    running = serve("serve", "--grace", "1")
    running.wait_for_file("urls")
    running.process.terminate()
    assert running.end()[0] == 0


@pytest.mark.slow
def test_keys_reach_the_server_in_a_private_file_that_is_deleted(serve: Any) -> None:
    running = serve("serve", "--rollout.servers.api_key_env", "STUB_KEY", STUB_KEY='a"b: c')
    running.wait_for_file("urls")
    started = running.started()
    assert json.loads(started["config"].removeprefix("api-key: ")) == 'a"b: c'
    assert started["config_folder_mode"] == 0o700
    file = Path(started["arguments"][started["arguments"].index("--config") + 1])
    assert 'a"b' not in Path(f"/proc/{started['pids'][0]}/cmdline").read_text()
    assert (running.folder / "logs/server_0.log").stat().st_mode & 0o777 == 0o600
    running.process.terminate()
    running.end()
    assert not file.exists() and not file.parent.exists()


def test_an_occupied_port_is_rejected_before_anything_starts(serve: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = serve("serve", "--rollout.servers.port", str(port))
        code, output = running.end()
    assert code == 2 and f"host = '127.0.0.1', port {port} cannot be used" in output
    assert not list(tmp_path.glob("started-*"))


def test_a_missing_command_is_reported(serve: Any) -> None:
    running = serve("serve", "--rollout.servers.command", '["/nowhere/sglang"]')
    code, output = running.end()
    assert code == 2 and "rollout.servers.command = '/nowhere/sglang' cannot be started" in output


@pytest.mark.slow
def test_given_urls_are_checked_and_nothing_is_started(serve: Any, tmp_path: Path) -> None:
    running = serve("serve", "--rollout.servers.api_key_env", "STUB_KEY", STUB_KEY="right")
    url = running.wait_for_file("urls").read_text().strip()
    rest = ["--rollout.servers.urls", json.dumps([url]), "--rollout.servers.api_key_env", "STUB_KEY"]

    def attach(*more: str, key: str = "right") -> tuple[int, str]:
        argv = [*running.argv[:5], "--urls-file", str(tmp_path / "attached"), *rest, *more]
        env = os.environ | {"PYTHONPATH": str(ROOT), "STUB_KEY": key}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    code, output = attach()
    assert code == 0 and f"{url}: healthy, SGLang 0.5.23, model stub" in output
    assert (tmp_path / "attached").read_text() == f"{url}\n"
    code, output = attach(key="wrong")
    assert code == 2 and "HTTP 401" in output and "rollout.servers.api_key_env" in output and "wrong" not in output
    rest[1] = json.dumps([f"http://127.0.0.1:{free_ports(1)}"])
    code, output = attach()
    assert code == 2 and "not healthy" in output and "Connection refused" in output


@pytest.mark.slow
def test_a_server_of_another_engine_is_reported(serve: Any) -> None:
    url = serve().wait_for_file("urls").read_text().strip()
    argv = [sys.executable, "-m", "megatron_dppo.commands.main", "serve", str(ROOT / "examples/chain_sum/vllm.toml")]
    done = subprocess.run(
        [*argv, "--rollout.servers.urls", json.dumps([url])],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "does not respond like vLLM" in done.stderr


@pytest.mark.parametrize(
    ("config", "arguments", "mode"),
    [
        ("dppo.toml", [], "none"),
        ("sglang.toml", [], "start"),
        ("vllm.toml", ["--rollout.servers.urls", '["http://a:1"]'], "attach"),
    ],
)
def test_scripts_can_print_the_plan_of_serve(
    config: str, arguments: list[str], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_dppo.commands.main import main

    assert main(["serve", str(ROOT / "examples/chain_sum" / config), "--print-mode", *arguments]) == 0
    assert capsys.readouterr().out == f"{mode}\n"


def test_serve_needs_no_torch_and_rejects_the_local_engine() -> None:
    program = (
        "import sys\nfrom megatron_dppo.commands.main import main\n"
        f"code = main(['serve', {str(CONFIG)!r}, '--dry-run'])\n"
        f"assert code == 0 and main(['serve', {str(CONFIG.with_name('dppo.toml'))!r}]) == 2\n"
        "assert not {'torch', 'megatron', 'transformers', 'aiohttp'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--enable-return-routed-experts" in done.stdout
    assert "rollout.engine = 'local' samples inside the trainer" in done.stderr
