"""The process of ``agent.environment``: its lines, its end, and its time limit. tests/engines has the real package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.engines.agents.environment import EnvironmentAgent
from megatron_dppo.engines.agents.runner import AgentTask
from megatron_dppo.errors import ConfigError, GenerateError
from tests.unit import configs

INTERPRETER = """#!PYTHON
import json, sys
starts = open("STARTS", "a+")
starts.write("x"), starts.flush(), starts.seek(0)
number = len(starts.read())
options = json.loads(sys.stdin.readline())["options"]
is_known = options["taskset"]["id"] != "none"
print(json.dumps({"ready": 2} if is_known else {"error": "no such taskset"}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    if "cancel" in call:
        print("cancelled", call["cancel"], file=open("STARTS.cancelled", "a"))
    elif call["task"] == "hang":
        continue
    elif call["task"] == "die" and number == 1:
        sys.exit("out of memory with " + call["api_key"])
    else:
        failure = "no: " + call["api_key"] if call["task"] == "fail" else ""
        values = {"reward": 0.5, "rewards": {"a b": 1.0}, "metrics": {"n": 2}}
        print(json.dumps({"id": call["id"], **values, "failure": failure}), flush=True)
"""
"""Stands where a Python with verifiers does."""


def task(key: Any) -> AgentTask:
    return AgentTask(prompt="", messages=(), label="", metadata={"task": key}, base_url="http://x/v1", api_key="k-1")


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    made: list[EnvironmentAgent] = []

    def make(environment: str = "verifiers:sums") -> EnvironmentAgent:
        python = tmp_path / "python"
        text = INTERPRETER.replace("PYTHON", sys.executable).replace("STARTS", str(tmp_path / "starts"))
        python.write_text(text)
        python.chmod(0o755)
        made.append(EnvironmentAgent(AgentConfig(environment=environment, environment_python=str(python))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_episode_has_rewards_by_name_and_its_key_is_in_no_message(agent: Callable[..., EnvironmentAgent]) -> None:
    environment = agent()
    good = asyncio.run(environment.run(task("any")))
    assert (good.value, good.failure) == (0.5, "")
    assert good.counts == {"agent/reward/a_b": 1.0, "agent/metric/n": 2.0}
    failed = asyncio.run(environment.run(task("fail")))
    assert failed.failure == "the environment failed: no: ***"
    assert "no column 'task'" in asyncio.run(environment.run(task(None))).failure


def test_a_process_that_ends_fails_its_episodes_and_the_next_one_starts_another(
    agent: Callable[..., EnvironmentAgent], tmp_path: Path
) -> None:
    environment = agent()

    async def two() -> list[Any]:
        hanging = asyncio.create_task(environment.run(task("hang")))
        await asyncio.sleep(0.1)
        return [await environment.run(task("die")), await hanging]

    for found in asyncio.run(two()):
        assert found.value is None and "ended with status 1: out of memory with ***" in found.failure
    assert asyncio.run(environment.run(task("die"))).value == 0.5
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_time_limit_cancels_the_episode_alone(agent: Callable[..., EnvironmentAgent], tmp_path: Path) -> None:
    environment = agent()

    async def limited() -> None:
        await environment.run(task("any"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.run(task("hang")), 0.1)

    asyncio.run(limited())
    assert asyncio.run(environment.run(task("any"))).value == 0.5
    assert (tmp_path / "starts.cancelled").read_text() == "cancelled 2\n"


def test_an_environment_that_cannot_be_loaded_ends_the_run(agent: Callable[..., EnvironmentAgent]) -> None:
    with pytest.raises(GenerateError, match="'verifiers:none' cannot be used: no such taskset"):
        asyncio.run(agent("verifiers:none").run(task("any")))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"environment": "sums", "environment_python": "p"}, "expected 'verifiers:TASKSET'"),
        ({"environment": "verifiers:sums"}, "agent.environment_python"),
        ({"environment": "verifiers:sums", "environment_python": "p", "reward": "exit"}, "its own reward"),
        ({"environment": "verifiers:sums", "environment_python": "p", "command": ["a"]}, "both set"),
        ({"command": ["a"], "reward": "environment"}, "without agent.environment"),
        ({"environment_python": "p"}, "no effect without an agent"),
        ({"command": ["a"], "environment_python": "p"}, "environment_python"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configs.config(agent=settings)
