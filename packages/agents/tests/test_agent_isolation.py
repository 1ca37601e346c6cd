"""Programs in namespaces of their own, with limits, and the end of all that they started."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import GenerateError
from megatron_dppo.types import Completion, SamplingParams
from megatron_dppo_agents import generate
from megatron_dppo_agents.generate import AgentFunction
from tests.unit.scripted import TASK, World

CALL = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
urllib.request.urlopen(urllib.request.Request(task["base_url"] + "/chat/completions", body, headers)).read()
"""
LEAVES_A_DAEMON = """
if os.fork() == 0:
    os.setsid()  # out of the session that is killed
    if os.fork() == 0:
        while True:
            with open(task["metadata"]["file"], "a") as file:
                file.write("x")
            time.sleep(0.02)
    os._exit(0)
os.wait()
time.sleep(0.3)
"""
SEES_NOTHING = """
other = task["metadata"]["other"]
assert other not in map(int, filter(str.isdigit, os.listdir("/proc"))) and os.getpid() < 10
try:
    os.kill(other, 0)
    sys.exit("a signal")
except ProcessLookupError:
    pass
assert open("/proc/self/status").read() and os.getuid() == task["metadata"]["user"]
"""


@pytest.fixture(autouse=True)
def script(world: World) -> None:
    world.script = {"assistant\n": "ok"}


@pytest.fixture(scope="module", autouse=True)
def namespaces_are_allowed() -> None:
    try:
        AgentFunction(AgentConfig(command=["true"], isolation="namespace"), {}).close()
    except GenerateError as error:
        pytest.skip(f"not allowed here: {error}")


def play(world: World, code: str, metadata: Any = None, **settings: Any) -> Completion:
    engine = world.engine([sys.executable, "-c", CALL + code], reward="exit", **settings)
    (result,) = engine.generate([replace(TASK, metadata=metadata or {})], SamplingParams(max_new_tokens=400, seed=1))
    return result


_SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("time.sleep(60)", "os.kill(os.getpid(), 9)")]


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", *_SLOW])
def test_everything_that_a_program_started_ends_with_it(world: World, tmp_path: Path, ending: str) -> None:
    """Also a process that left its session, whether the program ends, fails, is killed, or takes too long."""
    file = tmp_path / "daemon"
    limit = 8.0 if "sleep" in ending else 100.0
    result = play(world, LEAVES_A_DAEMON + ending, {"file": str(file)}, isolation="namespace", timeout_seconds=limit)
    assert (result.reward, bool(result.failure)) == {"": (1.0, False), "time.sleep(60)": (None, True)}.get(
        ending, (0.0, False)
    )
    size = file.stat().st_size
    assert size > 0
    time.sleep(0.3)
    assert file.stat().st_size == size, "nothing writes any more"


def test_a_program_sees_its_own_processes_alone(world: World) -> None:
    metadata = {"other": os.getpid(), "user": os.getuid()}
    assert play(world, SEES_NOTHING, metadata, isolation="namespace").reward == 1.0
    assert play(world, SEES_NOTHING, metadata).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["landlock", "namespace"])
def test_limits_hold_for_a_program_and_its_children(world: World, isolation: str) -> None:
    child = "import subprocess\nsys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode != {status})"
    big = "import mmap, sys\ntry:\n    mmap.mmap(-1, 10**9)\nexcept OSError:\n    sys.exit(5)"
    settings = {"isolation": isolation, "max_memory_gb": 0.5, "max_cpu_seconds": 1}
    assert play(world, child.format(code=big, status=5), **settings).reward == 1.0
    busy = "while True: pass"
    assert play(world, child.format(code=busy, status=-9), **settings).reward == 1.0
    assert play(world, child.format(code=big, status=0), isolation=isolation).reward == 1.0


def test_where_namespaces_are_forbidden_the_run_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generate, "isolated_command", lambda command, config: [sys.executable, "-c", "exit('no mount')"]
    )
    with pytest.raises(GenerateError, match=r"no mount.*set agent.isolation = 'landlock'"):
        AgentFunction(AgentConfig(command=["true"], isolation="namespace"), {})


@pytest.mark.parametrize(
    "settings",
    [
        {"command": ["true"], "isolation": "none", "max_memory_gb": 1.0},
        {"function": "a:b", "max_cpu_seconds": 5},
    ],
)
def test_limits_without_a_program_of_their_own_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect"):
        AgentConfig(**settings)
