"""The process of ``agent.environment``: its lines, its end, and its time limit. tests/engines has the real package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError, GenerateError
from megatron_dppo.rollout.batch import has_signal
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run.step import make_samples
from megatron_dppo.types import SamplingParams
from megatron_dppo_agents import environment as environment_module
from megatron_dppo_agents.environment import EnvironmentAgent
from megatron_dppo_agents.episode_rewards import AgentRun
from megatron_dppo_agents.runner import AgentTask
from test_segments import Scorer
from tests.unit import configs
from tests.unit.scripted import TASK, World

INTERPRETER = """#!PYTHON
import json, os, sys, time
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
    elif call["task"] == "die holding the output" and os.fork() == 0:
        time.sleep(600)
    elif call["task"].startswith("die") and number == 1:
        sys.exit("out of memory with " + call["api_key"])
    else:
        failure = "no: " + call["api_key"] if call["task"] == "fail" else ""
        runs = [{"session": "s", "agent": "agent", "is_trained": True, "reward": 0.5}]
        values = {"runs": runs, "rewards": {"a b": 1.0}, "metrics": {"n": 2}}
        print(json.dumps({"id": call["id"], **values, "failure": failure}), flush=True)
"""
"""Stands where a Python with verifiers does."""
GAME = """#!PYTHON
import json, sys, threading, urllib.request
json.loads(sys.stdin.readline())
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    def ask(session, *texts):
        roles = ["user", "assistant"] * 2
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        headers = {"Authorization": "Bearer " + call["api_key"], "X-Session-ID": session}
        headers["Content-Type"] = "application/json"
        body = json.dumps({"model": "m", "messages": messages}).encode()
        urllib.request.urlopen(urllib.request.Request(call["base_url"] + "/chat/completions", body, headers)).read()
    both = [threading.Thread(target=ask, args=(name, "bid")) for name in "ab"]
    [each.start() for each in both], [each.join() for each in both]
    ask("judge", "bid", "seven", "who?")
    ask("a", "bid", "seven", "why a?")
    ask("b", "bid", "seven", "why b?")
    ask("retried", "bid")
    first, second = map(float, call["task"].split())
    runs = [
        {"session": "judge", "agent": "judge", "is_trained": False, "reward": 9.0},
        {"session": "a", "agent": "first", "is_trained": True, "reward": first},
        {"session": "b", "agent": "second", "is_trained": True, "reward": second},
        {"session": "elsewhere", "agent": "second", "is_trained": True, "reward": 9.0},
    ]
    print(json.dumps({"id": call["id"], "runs": runs, "rewards": {}, "metrics": {}, "failure": ""}), flush=True)
"""
"""Two players, whose first calls have equal bodies, and a judge who gets the messages of both. Besides a run that was
tried again, and one of another model."""


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
    assert (good.runs, good.failure) == ((AgentRun("s", "agent", True, 0.5),), "")
    assert good.counts == {"agent/reward/a_b": 1.0, "agent/metric/n": 2.0}
    failed = asyncio.run(environment.run(task("fail")))
    assert failed.failure == "the environment failed: no: ***"
    assert "no column 'task'" in asyncio.run(environment.run(task(None))).failure


@pytest.mark.parametrize("end", ["die", "die holding the output"])
def test_a_process_that_ends_fails_its_episodes_and_the_next_one_starts_another(
    agent: Callable[..., EnvironmentAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(environment_module, "OUTPUT_SECONDS", 0.2)
    environment = agent()

    async def two() -> list[Any]:
        hanging = asyncio.create_task(environment.run(task("hang")))
        await asyncio.sleep(0.1)
        return [await environment.run(task(end)), await hanging]

    for found in asyncio.run(asyncio.wait_for(two(), 60)):
        assert not found.runs and "ended with status 1: out of memory with ***" in found.failure
    assert len(asyncio.run(environment.run(task("die"))).runs) == 1
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_time_limit_cancels_the_episode_alone(agent: Callable[..., EnvironmentAgent], tmp_path: Path) -> None:
    environment = agent()

    async def limited() -> None:
        await environment.run(task("any"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.run(task("hang")), 0.1)

    asyncio.run(limited())
    assert len(asyncio.run(environment.run(task("any"))).runs) == 1
    assert (tmp_path / "starts.cancelled").read_text() == "cancelled 2\n"


def test_agents_of_one_episode_are_told_apart_and_credited_one_by_one(world: World, tmp_path: Path) -> None:
    """By hand: the first player has the rewards 1 and 0.5 in two episodes, the second -1 and -0.5. The means are 0."""
    python = tmp_path / "python"
    python.write_text(GAME.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    world.script = {
        f"{text}<|im_end|>\n<|im_start|>assistant\n": "seven" for text in ("bid", "who?", "why a?", "why b?")
    }
    engine = world.engine("verifiers:game", environment_python=str(python), credit="agent")
    prompts = [replace(TASK, metadata={"task": rewards}) for rewards in ("1 -1", "0.5 -0.5")]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=600, seed=1))
    for each in completions:
        # Both players go on with their conversations. The judge and the run that was tried again do not train.
        assert not each.failure and each.reward == 0.0
        assert [world.trained(part) for part in each.segments] == [["seven<|im_end|>"] * 2] * 2
        assert [world.text(part).count(f"why {name}?") for part in each.segments for name in "ab"] in (
            [1, 0, 0, 1],
            [0, 1, 1, 0],
        )
        counts = {name: each.counts[f"agent/{name}"] for name in ("calls", "repeated_calls", "sequences", "segments")}
        assert counts == {"calls": 6, "repeated_calls": 0, "sequences": 4, "segments": 2}
        assert each.counts["agent/untrained/left_out"] > 0 and not any(
            value for name, value in each.counts.items() if name.startswith("agent/forks")
        )
    (group,) = score_completions(Scorer(), prompts[:1], completions)  # type: ignore[arg-type]
    assert has_signal(group)
    deviation = 0.125**0.5 + 1e-4
    for advantage, expected in (
        ("mean", {"a": (0.25, -0.25), "b": (-0.25, 0.25)}),
        ("std", {"a": (0.25 / deviation, -0.25 / deviation), "b": (-0.25 / deviation, 0.25 / deviation)}),
        ("leave_one_out", {"a": (0.5, -0.5), "b": (-0.5, 0.5)}),
        ("none", {"a": (1.0, 0.5), "b": (-1.0, -0.5)}),
    ):
        samples = make_samples([group], TrainConfig(advantage=advantage), RewardConfig())
        for index, sample in enumerate(samples):
            player = "a" if "why a?" in world.tokenizer.decode(sample.tokens.tolist()) else "b"
            value = expected[player][index // 2]
            mask = sample.loss_mask
            assert int(mask.sum()) == 12 and sample.advantages[mask].tolist() == pytest.approx([value] * 12), advantage
            assert not sample.advantages[~mask].any()
    failed = replace(completions[0], failure="x", segment_credits=())
    (group,) = score_completions(Scorer(), prompts[:1], [*completions, failed])  # type: ignore[arg-type]
    samples = make_samples([group], TrainConfig(advantage="mean"), RewardConfig())
    assert [bool(sample.advantages.any()) for sample in samples] == [True] * 4 + [False] * 2
    # Credit by episode: the rewards of both episodes are 0.
    (group,) = score_completions(
        Scorer(),
        prompts[:1],
        [replace(each, segment_credits=()) for each in completions],  # type: ignore[arg-type]
    )
    assert not has_signal(group)


def test_an_environment_that_cannot_be_loaded_ends_the_run(agent: Callable[..., EnvironmentAgent]) -> None:
    with pytest.raises(GenerateError, match="'verifiers:none'"):
        asyncio.run(agent("verifiers:none").run(task("any")))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"environment": "sums", "environment_python": "p"}, "expected 'verifiers:TASKSET'"),
        ({"environment": "verifiers:sums"}, "agent.environment_python"),
        ({"environment": "verifiers:sums", "environment_python": "p", "reward": "exit"}, "its own reward"),
        ({"environment": "verifiers:sums", "environment_python": "p", "command": ["a"]}, "both set"),
        ({"command": ["a"], "reward": "environment"}, "without agent.environment"),
        ({"environment_python": "p"}, "no effect without"),
        ({"command": ["a"], "untrained_agents": ["judge"]}, "untrained_agents has no effect"),
        ({"command": ["a"], "reward": "call", "credit": "agent"}, "only an environment"),
        ({"command": ["a"], "environment_python": "p"}, "environment_python"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configs.config(agent=settings)
