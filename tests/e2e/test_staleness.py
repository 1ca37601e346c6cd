"""Rollouts that are sampled while the policy trains: the same run every time, also when it is killed and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_dppo.types import DropReason
from tests.e2e.runs import flags, from_base, kill_when_exists, records, train, without_timings
from tests.e2e.test_resume import assert_same_run

pytestmark = pytest.mark.e2e

STEPS = 5


@pytest.fixture(scope="module")
def run_flags(base_model: Path) -> list[str]:
    return from_base(
        base_model,
        run__num_steps=STEPS,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=8,
        rollout__dynamic_sampling="true",
        rollout__max_refills=1,
        rollout__oversample=1.5,
        eval__max_prompts=16,
        eval__every=2,
        optimizer__lr=3e-3,
        checkpoint__save_every=1,
        log__curves="false",
    )


@pytest.fixture(scope="module")
def uninterrupted(run_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staleness") / "uninterrupted"
    result = train([*run_flags, *flags(run__output_dir=folder, train__max_staleness=1)], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_age_and_oversampling_are_logged_and_old_rollouts_are_further_from_the_policy(uninterrupted: Path) -> None:
    steps = [r for r in records(uninterrupted) if "rollout/reward" in r]
    assert [r["rollout/policy_age_max"] for r in steps] == [0, 1, 1, 1, 1]
    assert steps[0]["rollout/policy_age"] == 0 and all(0 < r["rollout/policy_age"] <= 1 for r in steps[1:])
    # The age is a mean over tokens, the fraction one over groups; refills are of age 0.
    assert all((r["rollout/stale_fraction"] in (0, 1)) == (r["rollout/policy_age"] in (0, 1)) for r in steps)
    dropped = [sum(r[f"rollout/dropped_groups/{why}"] for why in DropReason) for r in steps]
    assert min(dropped) >= 2, "each of 2 ranks drew 3 prompts and trains on 2"
    assert all("perf/prefetch_wait_seconds" in r for r in steps[:-1])
    first, *later = [r["train/abs_prob_diff_first"] for r in steps]
    assert min(later) > 2 * first, "the first batch differs by the engine's rounding alone, the others by a whole step"


def test_killed_with_rollouts_sampled_ahead_and_resumed_equals_uninterrupted(
    run_flags: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    arguments = [*run_flags, *flags(run__output_dir=tmp_path / "run", train__max_staleness=1)]
    kill_when_exists(tmp_path / "run/checkpoints/step_000003.partial", arguments)
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    assert {p.name for p in checkpoint.glob("rollouts_*")} == {f"rollouts_{rank:05d}.safetensors" for rank in (0, 1)}
    assert json.loads((checkpoint / "state.json").read_text())["stream"]["draws"][0][0]["sampled_at"] == 1
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(step 2, policy version 4)" in result.stdout and "sampled again" not in result.stdout
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.long
def test_rollouts_sampled_ahead_go_to_another_layout_or_back_into_the_stream(
    run_flags: list[str], tmp_path: Path
) -> None:
    arguments = [*run_flags, *flags(run__num_steps=2, rollout__dynamic_sampling="false")]
    arguments += flags(parallel__expert_model_parallel_size=1)
    settings = flags(train__max_staleness=1, parallel__tensor_model_parallel_size=2)
    folder, copy = tmp_path / "run", tmp_path / "copy"
    ahead = train([*arguments, *settings, *flags(run__output_dir=folder)], processes=2)
    assert ahead.returncode == 0, ahead.stderr
    state = json.loads((folder / "checkpoints/step_000001/state.json").read_text())
    assert state["stream"]["cursor"] == 12 and state["stream"]["draws"][0][0]["places"][0] == [6, 1]
    shutil.rmtree(folder / "checkpoints/step_000002")
    shutil.copytree(folder, copy)

    one_process = train([*arguments, *flags(run__output_dir=folder, train__max_staleness=1)])
    assert one_process.returncode == 0, one_process.stderr
    assert "on another layout" in one_process.stdout and "sampled again" not in one_process.stdout
    assert records(folder)[-1]["rollout/policy_age"] == 1

    changed = [*arguments, *flags(run__output_dir=copy, train__max_staleness=0, checkpoint__accept_changes="true")]
    on_policy = train(changed)
    assert on_policy.returncode == 0, on_policy.stderr
    assert "sampled again: they are older than train.max_staleness = 0 allows" in on_policy.stdout
    assert records(copy)[-1]["rollout/policy_age_max"] == 0
    state = json.loads((copy / "checkpoints/step_000002/state.json").read_text())
    assert state["stream"]["cursor"] == 12 and not list((copy / "checkpoints/step_000002").glob("rollouts_*"))


REWARD = '''
calls = 0


def later_broken(*, prompt, completion, label, metadata):
    """Fails from the second batch on; every process counts for itself."""
    global calls
    calls += 1
    if calls > 24:
        raise RuntimeError("the grader went down")
    return float(len(completion) % 2)
'''


def test_a_reward_that_fails_in_the_background_ends_all_ranks_with_its_error(
    run_flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    settings = flags(
        run__output_dir=tmp_path / "run",
        reward__function="my_rewards:later_broken",
        rollout__dynamic_sampling="false",
        eval__every=100,
        eval__max_prompts=1,
        train__max_staleness=1,
    )
    result = train([*run_flags, *settings], processes=2, extra_path=tmp_path)
    assert result.returncode != 0
    assert "failed on all" in result.stderr and "RuntimeError: the grader went down" in result.stderr
    assert not [r for r in without_timings(tmp_path / "run") if r["step"] > 1]
