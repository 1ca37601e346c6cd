"""Whole runs with a teacher: the base model learns from what 25 steps of DPPO made of it, without a reward."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

import pytest

from tests.e2e.runs import BASE_MODEL, from_base, records, step_records, train

pytestmark = pytest.mark.e2e


def student(base_run: Path, folder: Path, **more: object) -> list[str]:
    """Arguments of a run of ten steps on two ranks."""
    settings: dict[str, object] = dict(
        run__output_dir=folder,
        run__num_steps=10,
        parallel__expert_model_parallel_size=1,
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=4,
        rollout__dtype="fp32",
        optimizer__lr=5e-4,
        optimizer__lr_decay_style="constant",
        optimizer__lr_warmup_steps=0,
        log__tensorboard="false",
        distillation__teacher_path=base_run / "hf",
        distillation__task_reward="false",
    )
    return from_base(BASE_MODEL, **settings | more)


def test_a_student_comes_to_its_teacher_and_to_what_it_can_do(base_run: Path, tmp_path: Path) -> None:
    """Forward KL over two shards of the vocabulary; the reward is only looked at."""
    arguments = student(
        base_run,
        tmp_path / "run",
        parallel__tensor_model_parallel_size=2,
        eval__every=10,
        distillation__divergence="forward_kl",
    )
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    for key in ("train/teacher_reverse_kl", "train/teacher_forward_kl", "train/distillation_loss"):
        values = [step[key] for step in steps]
        # Single steps stand out: each has a few prompts only.
        assert median(values[len(values) // 2 :]) < 0.6 * values[0], (key, values)
    for step in steps:
        forward = step["train/teacher_forward_kl"]
        assert step["train/distillation_loss"] == pytest.approx(forward, rel=1e-3, abs=1e-6)
        assert step["train/loss"] == pytest.approx(forward, rel=1e-3, abs=1e-6), "the policy's own term is 0"
    accuracy = [step["eval/accuracy"] for step in records(tmp_path / "run") if "eval/accuracy" in step]
    assert accuracy[-1] > accuracy[0] + 0.15, accuracy


@pytest.mark.long
def test_the_sampled_tokens_of_older_rollouts_bring_it_there_too(base_run: Path, tmp_path: Path) -> None:
    """Without labels and without any reward."""
    arguments = student(
        base_run,
        tmp_path / "run",
        rollout__prompts_per_step=16,
        rollout__samples_per_prompt=8,
        optimizer__lr=3e-4,
        train__max_staleness=1,
        reward__function="none",
        data__label_key="",
    )
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    values = [step["train/teacher_reverse_kl"] for step in steps]
    assert fmean(values[-3:]) < 0.5 * fmean(values[:2]), values
    assert all(step["rollout/reward"] == 0 for step in steps)
