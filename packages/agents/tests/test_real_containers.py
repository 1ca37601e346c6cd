"""Programs in containers of the real podman and docker: what they see, their limits, and their ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.types import Completion, SamplingParams
from real_containers import IMAGE, RealTool
from test_agent_isolation import CALL
from tests.unit.scripted import TASK, World

pytestmark = pytest.mark.long

LOOKS_AROUND = """
import re, socket
status = open("/proc/self/status").read()
seen = {
    "user": os.getuid(),
    "processes": len([each for each in os.listdir("/proc") if each.isdigit()]),
    "capabilities": int(re.search(r"CapEff:\\s*(\\S+)", status)[1], 16),
    "no_new_privileges": int(re.search(r"NoNewPrivs:\\s*(\\S+)", status)[1]),
    "variables": sorted(os.environ),
    "has_file": os.path.exists(task["metadata"]["file"]),
    "interfaces": [name for _, name in socket.if_nameindex()],
}
try:
    socket.create_connection(("127.0.0.1", task["metadata"]["port"]), 2)
    seen["reaches_trainer"] = True
except OSError:
    seen["reaches_trainer"] = False
try:
    open("/tmp/written", "w").close()
    open("/var/written", "w")
    seen["writes"] = True
except OSError:
    seen["writes"] = False
sys.exit("seen " + json.dumps(seen))
"""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""
TRAINER = """
import asyncio, sys
from pathlib import Path
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo_agents.containers import ContainerAgent
from megatron_dppo_agents.runner import AgentTask
tool, image, folder = sys.argv[1:]
config = AgentConfig(command=["python3"], isolation=tool, container={"image": image, "network": "host"})
agent = ContainerAgent(["python3", "-c", "import time; time.sleep(600)"], config, Path(folder))
task = AgentTask(prompt="", messages=(), label="", metadata={}, base_url="http://127.0.0.1:9/v1", api_key="k")
async def main():
    await agent.start()
    print(agent._watcher.pid, flush=True)
    await agent.run(task)
asyncio.run(main())
"""
"""A trainer with one container that does not end."""


@pytest.fixture(scope="module", params=["podman", "docker"])
def tool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealTool]:
    with pytest.MonkeyPatch.context() as patch:
        made = RealTool(request.param, tmp_path_factory.mktemp("tool"), patch)
        yield made
        made.close()


@pytest.fixture
def world(world: World) -> World:
    world.script = {"assistant\n": "ok"}
    return world


def play(world: World, tool: RealTool, code: str, metadata: Any = None, **settings: Any) -> Completion:
    network = "endpoint" if tool.name == "podman" else "host"
    container = {"image": IMAGE, "network": network, **settings.pop("container", {})}
    command = ["python3", "-c", CALL + code]
    engine = world.engine(command, isolation=tool.name, container=container, **settings)
    (result,) = engine.generate([replace(TASK, metadata=metadata or {})], SamplingParams(max_new_tokens=400, seed=1))
    return result


def test_a_program_sees_its_container_alone(world: World, tool: RealTool, tmp_path: Path) -> None:
    """With podman it reaches nothing but the endpoint, which it does before."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        metadata = {"file": str(tmp_path), "port": server.getsockname()[1]}
        result = play(world, tool, LOOKS_AROUND, metadata, container={"read_only": True}, pass_env=["LANGUAGE"])
    assert "seen " in result.failure, result.failure
    seen = json.loads(result.failure.partition("seen ")[2])
    variables = set(seen.pop("variables"))
    assert {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"} <= variables
    allowed = {"ANTHROPIC_BASE_URL", "PATH", "HOME", "HOSTNAME", "TERM", "container", "LANGUAGE"}
    assert variables - {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"} <= allowed
    interfaces = seen.pop("interfaces")
    assert (interfaces == ["lo"]) == (tool.name == "podman")
    assert seen == {
        "user": 65534,
        "processes": 1,
        "capabilities": 0,
        "no_new_privileges": 1,
        "has_file": False,
        "reaches_trainer": tool.name == "docker",
        "writes": False,
    }
    assert not tool.containers()


def test_memory_processes_and_cpu_time_are_limited(world: World, tool: RealTool) -> None:
    grows = "data = bytearray(400 << 20)\nprint(len(data))"
    settings: dict[str, Any] = {"reward": "exit"}
    assert play(world, tool, grows, **settings).reward == 1.0
    assert play(world, tool, grows, max_memory_gb=0.1, **settings).reward == 0.0
    forks = "if sum(os.fork() > 0 for _ in range(1)) and os.fork(): os.wait()"
    assert play(world, tool, forks, **settings).reward == 1.0
    assert play(world, tool, forks, container={"max_processes": 2}, **settings).reward == 0.0
    # podman forgets the defaults of ``_PODMAN_SETTINGS`` with any ``--ulimit``.
    options = {"options": ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]}
    busy = play(world, tool, "while True: pass", max_cpu_seconds=1, container=options, **settings)
    assert (busy.reward, busy.failure) == (0.0, "")
    assert not tool.containers()


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "time.sleep(600)"])
def test_a_container_ends_with_its_episode(world: World, tool: RealTool, ending: str) -> None:
    """Also what has left the program's session, whether the program ends, fails or takes too long."""
    limit = 6.0 if "sleep" in ending else 100.0
    result = play(world, tool, DAEMON + ending, timeout_seconds=limit, reward="exit")
    assert result.reward == {"": 1.0, "sys.exit(3)": 0.0}.get(ending)
    assert not tool.containers()


def test_an_image_that_does_not_exist_is_not_pulled(world: World, tool: RealTool) -> None:
    container = {"image": None, "image_column": "image"}
    result = play(world, tool, "", {"image": "localhost/not/there:1"}, container=container, reward="exit")
    assert result.reward is None and f"{tool.name} cannot start a container of localhost/not/there:1" in result.failure
    result = play(world, tool, "", container={"options": ["--workdir=/proc/none"]}, reward="exit")
    assert result.reward is None


def start_trainer(tool: RealTool, folder: str) -> tuple[subprocess.Popen[str], int]:
    """Start a trainer, and return it and the id of its watcher once its container runs."""
    before = set(tool.containers())
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, tool.name, IMAGE, folder], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    watcher = int(trainer.stdout.readline())
    until(lambda: set(tool.containers()) - before)
    return trainer, watcher


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_no_container_is_left_after_a_crash(tool: RealTool, tmp_path: Path) -> None:
    trainer, watcher = start_trainer(tool, str(tmp_path))
    os.kill(watcher, signal.SIGTERM)  # as to the job, but the watcher goes on
    kill(trainer)
    until(lambda: not tool.containers())


def test_a_start_removes_what_the_same_run_left_behind_alone(tool: RealTool, tmp_path: Path) -> None:
    """As after a crash of the machine: the watcher has ended too."""
    folders = [str(tmp_path / name) for name in ("a, b=c", "other")]
    for folder in folders:
        trainer, watcher = start_trainer(tool, folder)
        os.kill(watcher, signal.SIGKILL)
        kill(trainer)
    left = tool.containers()
    assert len(left) == 2
    second, _ = start_trainer(tool, folders[0])
    (other,) = set(left) & set(tool.containers())
    assert "other" in tool.run("inspect", "--format", '{{index .Config.Labels "megatron-dppo.folder"}}', other)
    # A further process of a run that is alive removes nothing of it.
    third, _ = start_trainer(tool, folders[0])
    assert len(tool.containers()) == 3
    for trainer in (second, third):
        kill(trainer)
    until(lambda: tool.containers() == [other])
    tool.run("rm", "--force", other)
