"""Failures during a run cost as little as possible and name their cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.runs import flags, records, step_records, train

pytestmark = pytest.mark.e2e

REWARDS = '''
import pathlib
import time


def flaky(*, prompt, completion, label, metadata):
    """Hangs once, and raises on some samples."""
    try:
        pathlib.Path(__file__).with_name("hung").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        time.sleep(600)
    if completion.startswith("\\\\boxed{-"):
        raise RuntimeError("no negative numbers, please")
    return float(len(completion))


def picky(*, prompt, completion, label, metadata):
    if len(completion) % 2:
        return 1.0
    raise ValueError("an even number of characters")


calls = 0


def broken(*, prompt, completion, label, metadata):
    """Fails after the evaluation before training."""
    global calls
    calls += 1
    if calls > 8:
        raise RuntimeError("the grader is down")
    return 0.0


def overflowing(*, prompt, completion, label, metadata):
    """Finite rewards whose sum is not: the advantages, and so the gradient, become infinite or NaN."""
    return 1e30 if len(completion) % 2 else -1e30
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


def test_a_reward_that_hangs_or_raises_costs_its_samples_only(short_run: list[str], rewards: Path) -> None:
    arguments = [*short_run, *flags(reward__function="my_rewards:flaky", reward__timeout_seconds=5)]
    result = train([*arguments, *flags(reward__max_failed_fraction=1)], extra_path=rewards)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning  rewards: ")]
    assert 1 <= len(lines) <= 2, "at most one for each rank"
    assert "rewards failed " in result.stdout
    steps = [r for r in records(rewards / "run") if "rollout/reward" in r]
    assert (rewards / "hung").exists(), "the reward never hung, so this test would prove nothing"
    assert all(0 < r["rollout/reward_failed_fraction"] < 1 for r in steps[:1])
    assert all(r["train/skipped_updates"] == 0 for r in steps)


def test_a_reward_that_often_fails_stops_the_run_after_a_save_and_names_the_line(
    short_run: list[str], rewards: Path
) -> None:
    result = train([*short_run, *flags(reward__function="my_rewards:picky")], extra_path=rewards)
    assert result.returncode == 3, result.stderr
    assert "of the rewards of step 1 failed, more than reward.max_failed_fraction = 0.1" in result.stderr
    line = REWARDS.splitlines().index('    raise ValueError("an even number of characters")') + 1
    assert f"ValueError: an even number of characters (at {rewards / 'my_rewards.py'}:{line})" in result.stderr
    assert (rewards / "run/checkpoints/step_000001").is_dir()
    # The advice of the message, from the state that it leaves.
    assert "Fix the reward and rerun the same command to resume, or raise the limit" in result.stderr
    shutil.copytree(rewards / "run", rewards / "raised")
    limit = flags(reward__max_failed_fraction=1, run__output_dir=rewards / "raised")
    raised = train([*short_run, *flags(reward__function="my_rewards:picky"), *limit], extra_path=rewards)
    assert raised.returncode == 0, raised.stderr
    assert "changed: reward.max_failed_fraction: 0.1 -> 1.0" in raised.stdout
    for step in step_records(rewards / "raised"):
        assert (step["rollout/dropped_token_fraction"] > 0) == (step["rollout/reward_failed_fraction"] > 0)
    (rewards / "my_rewards.py").write_text(REWARDS.replace("raise ValueError", "return 0.0  # ValueError"))
    fixed = [*short_run, *flags(reward__function="my_rewards:picky")]
    other = train([*fixed, *flags(rollout__temperature=0.9)], extra_path=rewards)
    assert other.returncode == 2 and other.stderr.rstrip().endswith("--allow-changed rollout.temperature")
    again = train(fixed, extra_path=rewards)
    assert again.returncode == 0, again.stderr
    assert "changed, as its failures stopped the run: reward.function: the content of" in again.stdout
    assert "resumed" in again.stdout and step_records(rewards / "run")[-1]["step"] == 2


def test_a_reward_that_always_fails_ends_the_run_with_its_error(short_run: list[str], rewards: Path) -> None:
    result = train([*short_run, *flags(reward__function="my_rewards:broken")], extra_path=rewards)
    assert result.returncode == 2
    assert "failed on all" in result.stderr and "RuntimeError: the grader is down" in result.stderr
    # The advice of the message. Without a checkpoint the run begins anew, and says with what.
    assert "Fix the function, then run the same command to resume" in result.stderr
    (rewards / "my_rewards.py").write_text(REWARDS.replace("if calls > 8", "if calls < 0"))
    fixed = [*short_run, *flags(reward__function="my_rewards:broken", rollout__temperature=0.9, run__num_steps=1)]
    again = train(fixed, extra_path=rewards)
    assert again.returncode == 0, again.stderr
    assert "an earlier start in this folder reached step 0 and left no checkpoint" in again.stdout
    for change in (
        "reward.function: the content of my_rewards:broken differs: ",
        "rollout.temperature: 1.0 -> 0.9",
        "run.num_steps: 2 -> 1",
    ):
        assert f"         changed: {change}" in again.stdout
    (before,) = (json.loads(line) for line in (rewards / "run/unsaved/metrics_1.jsonl").read_text().splitlines())
    assert before["step"] == 0 and "eval/accuracy" in before
    assert [record["step"] for record in step_records(rewards / "run")] == [1]


def test_non_finite_gradients_are_skipped_counted_and_then_stop_the_run(short_run: list[str], rewards: Path) -> None:
    options = flags(
        reward__function="my_rewards:overflowing",
        run__num_steps=10,
        train__max_skipped_updates=2,
        train__advantage="mean",
        data__eval="task:chain_sum",
    )
    result = train([*short_run, *options], extra_path=rewards)
    assert result.returncode == 3, result.stderr
    assert "not finite in 2 updates in a row" in result.stderr and "train/ratio_max" in result.stderr
    steps = [r for r in records(rewards / "run") if "rollout/reward" in r]
    assert [r["train/skipped_updates"] for r in steps] == [2.0], "two mini-batches in the only step"
    assert len(list((rewards / "run/checkpoints").glob("step_*"))) == 1, "the weights are saved before the stop"


@pytest.mark.long
def test_a_checkpoint_of_another_model_or_seed_is_refused(
    short_run: list[str], tmp_path: Path, base_model: Path
) -> None:
    assert train(short_run).returncode == 0
    seed = train([*short_run, "--run.seed", "7"])
    assert seed.returncode == 2 and "was written with seed = 0, this run has 7" in seed.stderr
    other, unfit = tmp_path / "other", tmp_path / "unfit"
    for folder in (other, unfit):
        shutil.copytree(base_model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    for file in other.glob("*.safetensors"):
        kept = {name: weight for name, weight in load_file(file).items() if not name.startswith("model.layers.1.")}
        save_file(kept, file)
    smaller = train([*short_run, *flags(model__path=other)])
    assert smaller.returncode == 2 and "was written with model = {'num_layers': 2" in smaller.stderr
    elsewhere = train([*short_run, *flags(model__path=unfit, run__output_dir=tmp_path / "elsewhere")])
    assert elsewhere.returncode == 2 and "the weights do not fit config.json" in elsewhere.stderr
    wider = train([*short_run, *flags(parallel__expert_model_parallel_size=2)], processes=2)
    assert wider.returncode != 0 and "has_expert_parallelism = False, this run" in wider.stderr
    never = train([*short_run, *flags(checkpoint__resume="never")])
    assert never.returncode == 2 and "already holds a run" in never.stderr


def test_rollouts_that_do_not_fit_the_policy_stop_every_rank_before_the_first_update(
    short_run: list[str], tmp_path: Path
) -> None:
    arguments = [*short_run, *flags(rollout__dtype="bf16", train__max_first_prob_diff=1e-9)]
    result = train(arguments, processes=2)
    assert result.returncode != 0
    assert "differ from those that the engine 'local' reported by" in result.stderr
    assert "bf16 allows 1e-09 (train.max_first_prob_diff)" in result.stderr
    assert "Traceback" not in result.stdout
    assert not [r for r in records(tmp_path / "run") if r["step"] > 0], "nothing was learned"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_mini_batches_without_a_counted_token_are_no_updates(short_run: list[str], tmp_path: Path) -> None:
    """Responses of one token that is no end are cut off, and ``mask_truncated`` leaves their tokens out of the loss.

    So most mini-batches of two samples have no token, the first one of a step too; then nothing is checked or updated.
    """
    few = flags(
        train__mask_truncated="true",
        train__mini_batches=4,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=1,
        run__num_steps=3,
    )
    result = train([*short_run, *few], processes=1)
    assert result.returncode == 0, result.stderr
    steps = [record for record in records(tmp_path / "run") if record["step"] > 0]
    assert len(steps) == 3 and all(step["train/skipped_updates"] == 0 for step in steps)
    assert any("train/abs_prob_diff" not in step for step in steps), "a step without a token"
