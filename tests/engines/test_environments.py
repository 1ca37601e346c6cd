"""Environments of verifiers 0.4 in a Python of their own: tasks, rewards, failures, and a training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_servers import END
from megatron_dppo.commands.main import main
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import GenerateError
from megatron_dppo.rollout.batch import has_signal
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run.step import make_samples
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_agents.environment import EnvironmentAgent
from test_segments import Scorer
from tests.engines.servers import TOOLS
from tests.unit.scripted import CALL, SAMPLED, TASK, World

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
ASK = "<|im_end|>\n<|im_start|>assistant\n"
NAME = "verifiers:vf_sums"
DUEL = "verifiers:vf_duel"


def install(name: str) -> Path:
    """Return the folder of an environment of ``tools/engines/agents.sh``."""
    done = subprocess.run([TOOLS / "agents.sh", "install", name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has verifiers."""
    return str(install("verifiers") / "bin/python")


@pytest.fixture(scope="module", autouse=True)
def environments_are_found() -> Iterator[None]:
    """The process gets PYTHONPATH, as programs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="module")
def rows(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The tasks, as ``megatron-dppo tasks`` writes them."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    command = ["tasks", str(EXAMPLES / "calculator.toml"), str(file), "--agent.command", "null"]
    command += ["--agent.environment", NAME, "--agent.environment_python", python]
    assert main(command) == 0
    assert main(command) != 0  # The file exists.
    return [json.loads(line) for line in file.read_text().splitlines()]


def episodes(world: World, python: str, tasks: list[str], **settings: Any) -> list[Completion]:
    prompts = [replace(SAMPLED, prompt_id=f"row:{n}", metadata={"task": task}) for n, task in enumerate(tasks)]
    engine = world.engine(NAME, environment_python=python, **settings)
    return engine.generate(prompts, SamplingParams(max_new_tokens=3000, seed=1))


def test_tasks_rewards_and_failures_by_name(rows: list[dict[str, Any]], python: str, world: World) -> None:
    assert [row["name"] for row in rows] == [f"{a}+{b}" for a in (1, 2, 3) for b in (1, 2, 3)]
    assert all(row["prompt"] == row["name"] and len(row["task"]) == 64 for row in rows)
    keys = {row["name"]: row["task"] for row in rows}
    world.script = {
        f"1+2{ASK}": CALL,
        f"3</tool_response>{ASK}": "It is 3",
        f"2+2{ASK}": "I am quite sure that it is 4",
        f"3+3{ASK}": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    }
    completions = episodes(world, python, [keys["1+2"], keys["2+2"], keys["3+3"], "0" * 64])
    tool, long, broken, unknown = completions
    # One sequence of two turns, with all sampled tokens trained.
    assert not tool.failure and tool.reward == 1.25
    assert world.trained(tool) == [f"{CALL}<|im_end|>", "It is 3<|im_end|>"]
    assert (tool.counts["agent/reward/right"], tool.counts["agent/reward/short"]) == (1, 1)
    assert tool.counts["agent/metric/turns"] == 2 and tool.counts["agent/segments"] == 1
    assert not long.failure and long.reward == 1.0 and long.counts["agent/reward/short"] == 0
    # The program raises a KeyError.
    assert broken.reward is None and "KeyError" in broken.failure, broken.failure
    assert "no task '0000" in unknown.failure


def test_the_keys_of_episodes_stay_with_them(
    rows: list[dict[str, Any]], python: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that the environment starts get the secret of verifiers' own server, and no key of the endpoint."""
    world.script = {f"1+2{ASK}": "nothing"}
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "leaked")
    options = {"agent": {"harness": {"id": "vf_environ"}}}
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'agents'}{os.pathsep}{os.environ['PYTHONPATH']}")
    key = next(row["task"] for row in rows if row["name"] == "1+2")
    (completion,) = episodes(world, python, [key], environment_options=options)
    # The mark by which the programs end with the trainer is no key.
    shown = completion.failure.replace("MEGATRON_DPPO_PROCESS", "")
    assert "OPENAI_BASE_URL" in shown and "MEGATRON_DPPO" not in shown and "SECRET_OF_THE_TRAINER" not in shown


@pytest.fixture
def duel(python: str, monkeypatch: pytest.MonkeyPatch) -> Prompt:
    """The task of an environment with two players and a judge."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'agents'}{os.pathsep}{os.environ['PYTHONPATH']}")
    agent = EnvironmentAgent(AgentConfig(environment=DUEL, environment_python=python))
    (row,) = agent.tasks()
    agent.close()
    return replace(TASK, metadata={"task": row["task"]})


@pytest.mark.long
def test_each_agent_of_a_game_gets_its_own_reward(duel: Prompt, python: str, world: World) -> None:
    """Two episodes that different players win. Their sums are equal, so that credit by episode would train nothing.

    The players bid with the same body at the same time, which is no repetition.
    """
    engine = world.engine(DUEL, environment_python=python, credit="agent", timeout_seconds=60)
    completions = []
    for winner in ("first", "second"):
        world.script = {f"bid{ASK}": "seven", f"first, why?{ASK}": "one", f"second, why?{ASK}": "two"}
        world.script[f"seven or seven{ASK}"] = winner
        completions += engine.generate([duel], SamplingParams(max_new_tokens=600, seed=1))
    for each, sign in zip(completions, (1, -1), strict=True):
        # The mean of 1, 0.5, -1 and 0.
        assert not each.failure and each.reward == 0.125
        assert [world.trained(part) for part in each.segments] == [
            [f"{text}<|im_end|>"] for text in ("seven", "seven", "one", "two")
        ]
        counts = {name: each.counts[f"agent/{name}"] for name in ("calls", "repeated_calls", "sequences", "segments")}
        assert counts == {"calls": 5, "repeated_calls": 0, "sequences": 5, "segments": 4}
        # One token for each character, and the end.
        judge = len("first" if sign == 1 else "second") + 1
        assert each.counts["agent/untrained/left_out"] == pytest.approx(judge / (6 + 6 + 4 + 4 + judge))
        assert each.counts["agent/reward/first.win"] == sign == -each.counts["agent/reward/second.win"]
        assert each.counts["agent/agent_reward/first"] == (0.75 if sign == 1 else -0.5)
        assert each.counts["agent/metric/second.length"] == 5 and "agent/reward/judge.win" not in each.counts
    # By hand: the rewards of each player are 1 and 0.5 in the episode that it wins, and -1 and 0 in the other. Their
    # mean is 0.125.
    wins, loses = {"seven": 0.875, "why": 0.375}, {"seven": -1.125, "why": -0.125}
    (group,) = score_completions(Scorer(), [duel], completions)  # type: ignore[arg-type]
    assert has_signal(group)
    samples = make_samples([group], TrainConfig(advantage="mean"), RewardConfig())
    credits = [credit for each in completions for credit in each.segment_credits]
    for index, (sample, credit) in enumerate(zip(samples, credits, strict=True)):
        has_won = credit.agent == ("first" if index < 4 else "second")
        text = world.tokenizer.decode(sample.tokens.tolist())
        if "why" in text:
            assert credit.agent in text.split("why")[0]
        expected = (wins if has_won else loses)["why" if "why" in text else "seven"]
        assert sample.advantages.tolist() == pytest.approx([expected * is_in for is_in in sample.loss_mask.tolist()])
    assert sorted(credit.agent for credit in credits[:2]) == ["first", "second"]
    episode = [replace(each, segment_credits=()) for each in completions]
    (group,) = score_completions(Scorer(), [duel], episode)  # type: ignore[arg-type]
    assert not has_signal(group)


@pytest.mark.long
def test_an_agent_is_left_out_by_name(duel: Prompt, python: str, world: World) -> None:
    world.script = {f"bid{ASK}": "seven", f"first, why?{ASK}": "one", f"second, why?{ASK}": "two"}
    world.script[f"seven or seven{ASK}"] = "first"
    engine = world.engine(DUEL, environment_python=python, untrained_agents=["second"])
    (completion,) = engine.generate([duel], SamplingParams(max_new_tokens=600, seed=1))
    assert world.trained(completion) == ["seven<|im_end|>", "one<|im_end|>"]
    assert completion.reward == 0.75 and not completion.segment_credits
    config = AgentConfig(environment=DUEL, environment_python=python, untrained_agents=["jugde"])
    with pytest.raises(GenerateError, match=r"\['jugde'\].*\['first', 'second', 'judge'\]"):
        EnvironmentAgent(config).tasks()


@pytest.mark.long
def test_a_game_of_openenv_is_played_to_its_end(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guesses 5 and 7 of a scripted policy; the number is 7. The harness gets its packages by uv."""
    binaries = install("openenv") / "bin"
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    port = tmp_path / "port"
    server = subprocess.Popen([binaries / "python", Path(__file__).parent / "agents/openenv_game.py", port])
    try:
        deadline = time.monotonic() + 120
        while not port.exists():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        taskset = {"base_url": f"http://127.0.0.1:{port.read_text()}", "resets": [{"target": 7}]}
        settings: dict[str, Any] = {
            "environment_python": str(binaries / "python"),
            "environment_options": {"taskset": taskset, "player": {"harness": {"id": "null"}}},
        }
        agent = EnvironmentAgent(AgentConfig(environment="verifiers:openenv", **settings))
        (row,) = agent.tasks()
        agent.close()
        guesses = ['{"number": 5}', '{"number": 7}']

        def sample(request: Any, position: int) -> int:
            start = world.tokenizer.decode(request.token_ids).split(ASK)
            tokens = [*world.encode(guesses[len(start) - 2]), END]
            return tokens[position - len(request.token_ids) + len(world.encode(start[-1]))]

        monkeypatch.setattr(world.server, "sample", sample)
        engine = world.engine("verifiers:openenv", **settings)
        prompt = replace(TASK, metadata={"task": row["task"]})
        (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=4000, seed=1))
    finally:
        server.kill()
        server.wait()
    assert not completion.failure and completion.reward == 0.75
    assert completion.counts["agent/reward/openenv_reward"] == 0.75
    assert world.trained(completion) == [f"{guess}<|im_end|>" for guess in guesses]
    assert [world.text(completion).count(hint) for hint in ('"hint": "guess"', '"hint": "higher"')] == [1, 1]


def test_an_environment_that_cannot_be_used_is_named_before_it_plays(python: str) -> None:
    config = AgentConfig(environment=NAME, environment_python=python, environment_options={"taskset": {"largst": 2}})
    with pytest.raises(GenerateError, match="largst"):
        EnvironmentAgent(config).tasks()
    with pytest.raises(GenerateError, match="taskset 'no_such_tasks' not found"):
        EnvironmentAgent(AgentConfig(environment="verifiers:no_such_tasks", environment_python=python)).tasks()


def test_the_training_example_starts(python: str, tmp_path: Path) -> None:
    """Its preparation, its tasks, and the checks before a run; docs/agents.md has what the training gives."""
    folder = tmp_path / "data"
    example = EXAMPLES / "vf_sums"
    subprocess.run([sys.executable, example / "prepare.py", folder], check=True)
    config = [str(example / "train.toml"), "--agent.environment_python", python]
    assert main(["tasks", config[0], str(folder / "train.jsonl"), *config[1:]]) == 0
    assert len((folder / "train.jsonl").read_text().splitlines()) == 81
    base = ["base", str(folder / "warmup.jsonl"), str(folder / "base"), "--model.path", str(folder / "model")]
    assert main([*base, "--steps", "1", "--batch-size", "4"]) == 0
    files = ["--model.path", str(folder / "base")]
    files += [f"--data.{split}={folder / 'train.jsonl'}" for split in ("train", "eval")]
    assert main(["train", *config, *files, "--run.output_dir", str(tmp_path / "run"), "--dry-run"]) == 0
