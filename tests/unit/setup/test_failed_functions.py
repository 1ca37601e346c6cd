"""A stop by failed user functions: which of them may differ at the next start, and until when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.errors import CheckpointError, DataError, GenerateError, RewardError, TrainingStopped
from megatron_dppo.setup.changes import check_changes
from megatron_dppo.setup.contents import read_contents
from megatron_dppo.setup.failed_functions import (
    AGENT_KEYS,
    FAILED_FUNCTIONS,
    REWARD_KEYS,
    FunctionsFailed,
    failed_keys,
    may_differ,
    record_failed_functions,
)
from megatron_dppo.setup.resume import find_changes_since
from tests.unit.configs import config


def test_only_errors_of_rewards_and_agents_name_functions() -> None:
    assert failed_keys(RewardError("all")) == failed_keys(FunctionsFailed("many", REWARD_KEYS)) == REWARD_KEYS
    assert failed_keys(GenerateError("64 in a row")) == failed_keys(FunctionsFailed("", AGENT_KEYS)) == AGENT_KEYS
    assert failed_keys(TrainingStopped("the gradient was not finite")) == failed_keys(DataError("a row")) == ()


@pytest.mark.parametrize(
    ("keys", "key", "step", "allowed"),
    [
        (REWARD_KEYS, "reward.function", 7, True),
        (REWARD_KEYS, "reward.functions.mine.function", 3, True),  # resumed from an earlier checkpoint
        (REWARD_KEYS, "reward.function", 8, False),  # a later checkpoint has the repaired function
        (REWARD_KEYS, "reward.options.url", 7, False),
        (REWARD_KEYS, "reward.format", 7, False),
        (REWARD_KEYS, "agent.function", 7, False),
        (AGENT_KEYS, "agent.command", 7, True),
        (AGENT_KEYS, "rollout.generate", 7, True),
        (AGENT_KEYS, "agent.max_calls", 7, False),
        (AGENT_KEYS, "reward.function", 7, False),
        (("*", "loss.name"), "loss.name", 7, False),  # not what a run writes
    ],
)
def test_the_failed_function_may_differ_until_a_later_checkpoint(
    tmp_path: Path, keys: tuple[str, ...], key: str, step: int, allowed: bool
) -> None:
    assert not may_differ(tmp_path, step, key), "nothing was recorded"
    record_failed_functions(tmp_path, 7, keys)
    assert may_differ(tmp_path, step, key) == allowed


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "7", "keys": ["reward.function"]}', '{"step": 7}'])
def test_a_damaged_record_allows_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FAILED_FUNCTIONS).write_text(text)
    assert not may_differ(tmp_path, 7, "reward.function")


def test_the_repaired_function_is_accepted_and_another_change_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "helper.py").write_text("SCALE = 1\n")
    (tmp_path / "mine.py").write_text("import helper\n\n\ndef score(completion, label, **_):\n    return None\n")
    settings = {"run": {"output_dir": str(run)}, "reward": {"function": f"{tmp_path}/mine.py:score"}}
    before = config(**settings)
    state = {"step": 7, "cwd": "/", "config": json.loads(before.model_dump_json())}
    state["contents"] = read_contents(state["config"]).contents
    (tmp_path / "mine.py").write_text("import helper\n\n\ndef score(completion, label, **_):\n    return 1.0\n")
    (tmp_path / "helper.py").write_text("SCALE = 2\n")

    def changes(**more: dict[str, object]) -> list[str]:
        now = config(**settings, **more)
        contents = read_contents(now.model_dump(mode="json")).contents
        differing = find_changes_since(state, run / "checkpoints/step_000007", now, contents)
        check_changes(differing, run, accepted=False)
        return [f"{each.kind} {each.key} {each.file}" for each in differing]

    with pytest.raises(CheckpointError, match=r"--allow-changed reward\.function$"):
        changes()
    record_failed_functions(run, 7, REWARD_KEYS)
    expected = ["repaired reward.function helper.py", f"repaired reward.function {tmp_path}/mine.py"]
    assert sorted(changes()) == sorted(expected)
    with pytest.raises(CheckpointError, match=r"--allow-changed loss\.name,loss\.topk$"):
        changes(loss={"name": "dppo_topk_tv", "topk": 8})
