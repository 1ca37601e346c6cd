"""Rewards that agents give by name: from a program's last line, a function, ``POST /v1/reward`` and an environment."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run.step import make_samples
from megatron_dppo.types import Completion
from megatron_dppo_agents import environment
from megatron_dppo_agents.environment import EnvironmentAgent
from megatron_dppo_agents.episode_rewards import AgentRun
from megatron_dppo_agents.runner import AgentExit, AgentTask
from test_agents import post, user
from tests.unit import configs
from tests.unit.scripted import TASK, World

WEIGHTS = {"format": 0.5, "answer": 2.0}
BOTH = {"format": 1, "answer": 0.25}
ASK = {"messages": [user("a")]}
LAST_LINE = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
headers = {"Authorization": f"Bearer {task['api_key']}", "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
urllib.request.urlopen(urllib.request.Request(task["base_url"] + "/chat/completions", body, headers)).read()
print("a log line")
print(sys.argv[1])
sys.exit(int(sys.argv[2]))
"""
WRONG = [
    ({"format": 1}, "lack 'answer'; give a number for each part of reward.agent_parts (format, answer)"),
    ({**BOTH, "style": 1}, "the part 'style', which reward.agent_parts (format, answer) lacks; add it there"),
    ({**BOTH, "answer": "x"}, "'answer' = 'x', expected a number"),
    ({**BOTH, "answer": True}, "'answer' = True, expected a number"),
    ({**BOTH, "answer": 1e39}, "'answer' = 1e+39"),
    ([1, 2], "'rewards' = [1, 2], expected an object"),
]


def config(**keys: Any) -> Config:
    """Return a configuration with some keys, ``section__key``."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in keys.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    return configs.config(**sections)


@pytest.fixture(autouse=True)
def script(world: World) -> None:
    world.script = {"assistant\n": "x"}


def check(result: Completion) -> None:
    assert not result.failure and result.reward == 0.5 * 1 + 2.0 * 0.25
    assert dict(result.reward_parts) == BOTH and list(result.reward_parts) == list(WEIGHTS)


def play_all(world: World, value: Any) -> dict[str, Completion]:
    """Play an episode that ends with ``{"rewards": value}`` in every way in which an agent can say it."""

    async def returns(task: AgentTask) -> Any:
        assert (await post(task, "/chat/completions", ASK))[0] == 200
        return {"rewards": value}

    async def posts(task: AgentTask) -> None:
        assert (await post(task, "/chat/completions", ASK))[0] == 200
        status, body = await post(task, "/reward", {"rewards": value})
        if status != 200:
            raise RuntimeError(f"{status}: {body['error']['message']}")
        assert body == {"rewards": BOTH}

    async def plays(self: EnvironmentAgent, task: AgentTask) -> AgentExit:
        assert (await post(task, "/chat/completions", ASK))[0] == 200
        return AgentExit(None, parts={"rewards": value}, runs=(AgentRun("", "agent", True, 7.0),))

    async def starts(self: EnvironmentAgent) -> None:
        pass

    program = [sys.executable, "-c", LAST_LINE, json.dumps({"rewards": value}), "0"]
    results = {}
    for name, agent, settings in (
        ("function", returns, {"reward": "exit"}),
        ("call", posts, {"reward": "call"}),
        ("program", program, {"reward": "exit"}),
        ("environment", "verifiers:x", {"environment_python": sys.executable}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EnvironmentAgent, "run", plays)
            patch.setattr(EnvironmentAgent, "start", starts)
            engine = world.engine(agent, part_weights=WEIGHTS, **settings)
            (results[name],) = engine.generate([TASK], params())
    return results


def params() -> Any:
    from megatron_dppo.types import SamplingParams

    return SamplingParams(max_new_tokens=400, seed=1)


def test_parts_come_from_everywhere_an_agent_ends(world: World) -> None:
    for result in play_all(world, BOTH).values():
        check(result)


@pytest.mark.parametrize(("value", "words"), WRONG, ids=str)
def test_missing_unknown_and_wrong_parts_fail_with_the_value_and_the_fix(world: World, value: Any, words: str) -> None:
    for name, result in play_all(world, value).items():
        assert words in result.failure and result.reward is None and not result.reward_parts, (name, result.failure)


def test_a_program_without_its_line_or_with_an_error_fails(world: World) -> None:
    for line, status, words in (
        (
            "done",
            "0",
            """expected {"rewards": {"format": NUMBER, "answer": NUMBER}} (reward.agent_parts), got 'done'""",
        ),
        ('{"reward": 1}', "0", "got {'reward': 1}"),
        (json.dumps({"rewards": BOTH}), "3", "ended with status 3"),
    ):
        agent = [sys.executable, "-c", LAST_LINE, line, status]
        result = world.play(agent, reward="exit", part_weights=WEIGHTS)
        assert words in result.failure and result.reward is None


def test_posts_by_name_and_by_number_exclude_each_other(world: World) -> None:
    answers: list[Any] = []

    async def agent(task: AgentTask) -> None:
        body = (await post(task, "/chat/completions", ASK))[1]
        for fields in ({"reward": 1}, {"rewards": BOTH, "id": body["id"]}, {"rewards": BOTH, "reward": 1}):
            answers.append(await post(task, "/reward", fields))
        for number in (0, 0.25):
            assert (await post(task, "/reward", {"rewards": {**BOTH, "answer": number}}))[0] == 200

    check(world.play(agent, reward="call", part_weights=WEIGHTS))
    form = 'expected {"rewards": {"format": NUMBER, "answer": NUMBER}} (reward.agent_parts)'
    assert all(status == 400 and body["error"]["message"].startswith(form) for status, body in answers)

    async def without(task: AgentTask) -> None:
        await post(task, "/chat/completions", ASK)
        answers.append(await post(task, "/reward", {"rewards": BOTH}))
        await post(task, "/reward", {"reward": 1})

    assert world.play(without, reward="call").reward == 1
    status, body = answers[-1]
    assert status == 400 and "Set reward.agent_parts = {format = 1.0, answer = 1.0}" in body["error"]["message"]

    async def returns(task: AgentTask) -> Any:
        await post(task, "/chat/completions", ASK)
        return {"rewards": BOTH}

    engine = world.engine(returns, reward="exit")
    (result,) = engine.generate([TASK], params())
    assert "Set reward.agent_parts = {format = 1.0, answer = 1.0}" in result.failure

    async def silent(task: AgentTask) -> None:
        await post(task, "/chat/completions", ASK)

    engine = world.engine(silent, reward="call", part_weights=WEIGHTS)
    (result,) = engine.generate([TASK], params())
    assert result.failure.endswith('POST /v1/reward {"rewards": {"format": NUMBER, "answer": NUMBER}}')


def test_gdpo_normalizes_the_parts_of_an_agent(world: World) -> None:
    """By hand: each part less its mean, by its deviation, then the weighted sum. A failed episode is left out."""
    values = [(1.0, 0.0), (0.0, 4.0), (1.0, 2.0)]

    async def agent(task: AgentTask) -> None:
        await post(task, "/chat/completions", ASK)

    base = world.play(agent)
    completions = [
        replace(base, reward=0.5 * a + 2 * b, reward_parts={"format": a, "answer": b}) for a, b in values
    ] + [replace(base, failure="it ended")]
    scorer = SimpleNamespace(score=lambda items, is_batch: [])
    (group,) = score_completions(scorer, [TASK], completions)  # type: ignore[arg-type]
    assert [rollout.reward_parts for rollout in group.rollouts][-1] == {}
    reward = RewardConfig(agent_parts=WEIGHTS)
    samples = make_samples([group], TrainConfig(advantage="gdpo"), reward)
    columns = torch.tensor(values, dtype=torch.float64)
    normed = (columns - columns.mean(0)) / (columns.std(0) + 1e-4)
    expected = normed @ torch.tensor([0.5, 2.0], dtype=torch.float64)
    sums = torch.tensor([0.5 * a + 2 * b for a, b in values])
    assert not torch.allclose(expected.float(), (sums - sums.mean()) / (sums.std() + 1e-4), atol=0.05)
    for sample, value in zip(samples, [*expected.tolist(), 0.0], strict=True):
        advantages = sample.advantages if sample.advantages.ndim else sample.advantages[None]
        assert torch.allclose(advantages[sample.loss_mask], torch.tensor(value, dtype=torch.float32), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward__agent_parts": WEIGHTS}, "gives rewards: set agent.reward"),
        ({"agent__function": "a:b", "reward__agent_parts": WEIGHTS}, "gives rewards: set agent.reward"),
        ({"agent__function": "a:b", "agent__reward": "call"}, "an agent reward.agent_parts"),
        (
            {"agent__function": "a:b", "agent__reward": "call", "reward__agent_parts": {"a": 1.0}},
            "'a' is the only",
        ),
        (
            {"agent__function": "a:b", "agent__reward": "call", "reward__agent_parts": WEIGHTS, "reward__format": 0.1},
            "reward.agent_parts and reward.format",
        ),
        (
            {
                **{"agent__function": "a:b", "agent__reward": "call", "agent__credit": "turn"},
                **{"reward__agent_parts": WEIGHTS, "train__advantage": "std"},
            },
            "rewards by name",
        ),
        ({"reward__agent_parts": {"a b": 1.0}}, "the part 'a b'"),
        ({"reward__agent_parts": {"score": 1.0}}, "the part 'score'"),
        ({"reward__agent_parts": {"a": 0.0}}, "every weight is 0"),
        ({"reward__agent_parts": {"a": float("inf")}}, "should be a finite"),
        (
            {"agent__function": "a:b", "agent__reward": "call", "reward__format": 0.1},
            "without parts. Set reward.agent_parts",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**{"train__advantage": "gdpo", **settings})
    assert words in str(error.value)


def test_gdpo_takes_the_parts_of_agents_and_of_functions() -> None:
    agent = {"agent__function": "a:b", "train__advantage": "gdpo"}
    made = config(**agent, agent__reward="call", reward__agent_parts=WEIGHTS)
    assert made.reward.part_weights == WEIGHTS
    # A part of weight 0 is only logged.
    assert config(**agent, agent__reward="exit", reward__agent_parts={**WEIGHTS, "turns": 0.0}).reward.part_weights == (
        WEIGHTS
    )
    # The run's own functions score episodes, too.
    assert list(config(**agent, reward__format=0.1).reward.part_weights) == ["score", "format"]


def test_the_start_of_an_environment_is_no_time_of_an_episode(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may take a minute to import on a busy machine; each episode has a second here."""
    starts: list[float] = []

    class SlowProcess:
        has_ended = False

        def __init__(self, _: object) -> None:
            starts.append(1.0)
            time.sleep(1.5)

        def ask(self, number: int, fields: Any) -> Future[dict[str, Any]]:
            reply: Future[dict[str, Any]] = Future()
            run = {"session": "", "agent": "agent", "is_trained": True, "reward": 1.0}
            reply.set_result({"id": number, "runs": [run], "rewards": {}, "metrics": {}, "failure": ""})
            return reply

        def close(self) -> None:
            pass

    monkeypatch.setattr(environment, "EnvironmentProcess", SlowProcess)
    engine = world.engine("verifiers:x", environment_python=sys.executable, timeout_seconds=1.0)
    task = replace(TASK, metadata={"task": "k"})
    (result,) = engine.generate([task], params())
    assert starts and "without a response of the policy" in result.failure
