"""``launch/torchrun.sh``: what it starts, what it forwards, what it leaves; with stand-ins for server and trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.engines.test_serving import STUB, free_ports, is_running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/chain_sum"

# In the place of torchrun: one rank, which ends by a file or at SIGTERM after the step that it is in, and its parent,
# which then kills it.
TORCHRUN = """
import signal, subprocess, sys, os
folder = os.environ["STUB_FOLDER"]
rank = '''
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
(folder / "training").touch()
while not (folder / "asked").exists() or (folder / "step").exists():
    if (folder / "end").exists():
        sys.exit(int((folder / "end").read_text()))
    time.sleep(0.05)
(folder / "saved").touch()
'''
open(os.path.join(folder, "connections"), "w").write(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
names = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF"
open(os.path.join(folder, "variables.json"), "w").write(__import__("json").dumps([os.environ.get(n) for n in names]))
open(os.path.join(folder, "trainer.json"), "w").write(__import__("json").dumps(sys.argv[1:]))
child = subprocess.Popen([sys.executable, "-c", rank, folder])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: (child.kill(), open(os.path.join(folder, "killed"), "w"), os._exit(9)))
sys.exit(child.wait())
"""


class Launch:
    def __init__(self, folder: Path, mode: str, config: str, *arguments: str) -> None:
        self.folder, self.port = folder, free_ports(1)
        (folder / "torchrun.py").write_text(TORCHRUN)
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\ncase "$*" in *torch.distributed.run*) exec {sys.executable} {folder}/torchrun.py "$@";; esac\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        servers = []
        if config != "dppo.toml":
            command = json.dumps([sys.executable, str(STUB), str(folder), mode])
            servers = ["--rollout.servers.command", command, "--rollout.servers.port", str(self.port)]
        self.process = subprocess.Popen(
            [str(ROOT / "launch/torchrun.sh"), str(EXAMPLES / config), *servers, *arguments],
            env=os.environ
            | {"PYTHON": str(python), "STUB_FOLDER": str(folder), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            # As from a shell in a terminal: a process group of its own, which does not ignore Ctrl-C.
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def until(self, name: str) -> None:
        end = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert self.process.poll() is None and time.monotonic() < end, self.end()
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def server_pids(self) -> list[int]:
        return json.loads((self.folder / f"started-{self.port}.json").read_text())["pids"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    (tmp_path / "end").write_text("0")  # nothing waits for ever


@pytest.mark.parametrize("code", [0, 3])
def test_training_starts_with_healthy_servers_and_its_exit_code_is_the_scripts(folder: Path, code: int) -> None:
    launch = Launch(folder, "serve", "sglang.toml", "--nproc-per-node", "2", "--run.seed", "5")
    launch.until("training")
    assert all(map(is_running, launch.server_pids()))
    (folder / "end").write_text(str(code))
    assert launch.end()[0] == code
    assert not any(map(is_running, launch.server_pids()))
    arguments = json.loads((folder / "trainer.json").read_text())
    assert arguments[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert arguments[5:8] == ["-m", "megatron_dppo.train", str(EXAMPLES / "sglang.toml")]
    assert arguments[-2:] == ["--run.seed", "5"]
    assert (folder / "connections").read_text() == os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert json.loads((folder / "variables.json").read_text()) == ["0", "0", "expandable_segments:True"]
    server = json.loads((folder / f"started-{launch.port}.json").read_text())
    variables = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF")
    assert [server["env"].get(name) for name in variables] == ["0", "0", None]
    assert server["env"].get("CUDA_DEVICE_MAX_CONNECTIONS") == os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_ranks_while_the_servers_stay_until_they_have_saved(folder: Path, number: int) -> None:
    launch = Launch(folder, "serve", "sglang.toml")
    launch.until("training")
    os.killpg(launch.process.pid, number)
    code, output = launch.end()
    assert code == 0 and "the trainer finishes its step and saves" in output
    assert output.index("saves") < output.index("stopping the servers")
    assert (folder / "saved").exists() and not (folder / "killed").exists()
    assert not any(map(is_running, launch.server_pids()))


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_lets_the_ranks_save_and_a_second_one_does_not_wait(folder: Path, presses: int) -> None:
    launch = Launch(folder, "serve", "sglang.toml")
    launch.until("training")
    (folder / "step").touch()
    os.killpg(launch.process.pid, signal.SIGINT)
    launch.until("asked")
    assert launch.process.poll() is None and all(map(is_running, launch.server_pids()))
    if presses == 2:
        os.killpg(launch.process.pid, signal.SIGINT)
    else:
        (folder / "step").unlink()
    code, output = launch.end()
    assert "Ctrl-C: the trainer finishes its step and saves" in output
    assert (code, (folder / "saved").exists(), (folder / "killed").exists()) == (
        (0, True, False) if presses == 1 else (130, False, True)
    )
    assert not any(map(is_running, launch.server_pids()))


@pytest.mark.parametrize("config", ["sglang.toml", "dppo.toml"])
def test_kill_9_of_the_script_lets_the_ranks_save_and_ends_the_servers_after_that(folder: Path, config: str) -> None:
    launch = Launch(folder, "serve", config)
    launch.until("training")
    servers = launch.server_pids() if config == "sglang.toml" else []
    family = psutil.Process(launch.process.pid).children(recursive=True)
    (folder / "step").touch()
    launch.process.kill()
    assert launch.process.wait() == -signal.SIGKILL
    until((folder / "asked").exists)
    time.sleep(2)  # longer than a server takes to end
    assert all(map(is_running, servers)) and not (folder / "saved").exists()
    (folder / "step").unlink()
    until(lambda: not any(is_running(process.pid) for process in family))
    assert (folder / "saved").exists() and not (folder / "killed").exists() and not any(map(is_running, servers))
    assert "was killed: the trainer finishes its step and saves" in launch.process.communicate()[0]


def test_kill_9_of_the_script_ends_servers_that_are_still_loading(folder: Path) -> None:
    launch = Launch(folder, "slow", "sglang.toml")
    launch.until(f"started-{launch.port}.json")
    launch.process.kill()
    until(lambda: not any(map(is_running, launch.server_pids())))
    assert "the trainer" not in launch.process.communicate()[0] and not (folder / "training").exists()


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_death_of_the_servers_ends_training(folder: Path) -> None:
    launch = Launch(folder, "die-later", "sglang.toml")
    launch.until("training")
    (folder / "die").touch()
    code, output = launch.end()
    assert code == 1 and "the server exited (exit code 7)" in output and "so training stops" in output
    assert (folder / "killed").exists()


def test_servers_that_do_not_start_keep_training_from_starting(folder: Path) -> None:
    launch = Launch(folder, "die", "sglang.toml")
    code, output = launch.end()
    assert code == 2 and "| no such model" in output and not (folder / "training").exists()


def test_the_local_engine_needs_no_servers(folder: Path) -> None:
    launch = Launch(folder, "serve", "dppo.toml")
    launch.until("training")
    (folder / "end").write_text("0")
    code, output = launch.end()
    assert code == 0 and "serve:" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "launch/torchrun.sh CONFIG.toml"),
        (["--run.seed", "1"], "launch/torchrun.sh CONFIG.toml"),
        (["x.toml", "--nproc-per-node", "two"], "--nproc-per-node = 'two': expected a number of ranks"),
        (["nowhere.toml"], "configuration file 'nowhere.toml' does not exist"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments: list[str], message: str) -> None:
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(ROOT / "launch/torchrun.sh"), *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and message in done.stderr
