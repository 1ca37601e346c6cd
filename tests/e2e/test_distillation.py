"""Whole runs with a teacher: a student from random weights comes to it, on no reward, and beside one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import CONFIG, flags, step_records, train

pytestmark = pytest.mark.e2e


def student(base_model: Path, folder: Path, **more: object) -> list[str]:
    """Arguments of a short run of the embedded model from random weights, its warmed-up self the teacher."""
    return flags(
        model__path=CONFIG.parent / "model",
        warmup__num_steps=0,
        parallel__expert_model_parallel_size=1,
        run__output_dir=folder,
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=16,
        rollout__dtype="fp32",
        optimizer__lr=2e-3,
        optimizer__lr_decay_style="constant",
        optimizer__lr_warmup_steps=0,
        eval__max_prompts=4,
        log__tensorboard="false",
        distillation__teacher_path=base_model,
        **more,
    )


def test_a_student_comes_to_its_teacher_without_any_reward(base_model: Path, tmp_path: Path) -> None:
    """Reverse and forward KL together, over two shards of the vocabulary."""
    first = tmp_path / "first"
    exact = student(
        base_model,
        first,
        run__num_steps=10,
        parallel__tensor_model_parallel_size=2,
        distillation__divergence="mixed_kl",
        distillation__weight=0.3,
        distillation__task_reward="false",
        reward__function="none",
        data__label_key="",
    )
    result = train(exact, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(first)
    for key in ("train/teacher_reverse_kl", "train/teacher_forward_kl", "train/distillation_loss"):
        assert steps[-1][key] < 0.5 * steps[0][key], (key, [step[key] for step in steps])
    assert all(step["rollout/reward"] == 0 and step["train/abs_prob_diff_first"] < 1e-5 for step in steps)
    for step in steps:
        parts = 0.7 * step["train/teacher_reverse_kl"] + 0.3 * step["train/teacher_forward_kl"]
        assert step["train/distillation_loss"] == pytest.approx(parts, rel=1e-4)
        assert step["train/loss"] == pytest.approx(parts, rel=1e-4), "the policy's own term is 0"


@pytest.mark.long
def test_the_sampled_tokens_alone_bring_it_there_too(base_model: Path, tmp_path: Path) -> None:
    sampled = student(
        base_model,
        tmp_path / "run",
        run__num_steps=30,
        rollout__samples_per_prompt=8,
        distillation__coef=0.5,
        train__max_staleness=1,
    )
    result = train(sampled, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    values = [step["train/teacher_reverse_kl"] for step in step_records(tmp_path / "run")]
    assert sum(values[-5:]) < 0.7 * sum(values[:5]), values
