"""A run that is killed continues from its last checkpoint by time, the default without any key of ``[checkpoint]``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.forked import kill_forked_when
from tests.e2e.runs import CONFIG, environment, flags, step_records, train

pytestmark = pytest.mark.e2e


def has_gone_on(folder: Path) -> bool:
    """Return True if a run has saved and then trained a further step."""
    saved = sorted((folder / "checkpoints").glob("step_??????"))
    return bool(saved) and (folder / "metrics.jsonl").read_text().count("\n") > int(saved[0].name.removeprefix("step_"))


def test_a_killed_run_continues_from_a_checkpoint_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = flags(
        run__output_dir=folder,
        run__num_steps=400,
        parallel__expert_model_parallel_size=1,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        eval__every=0,
        eval__max_prompts=4,
        log__tensorboard="false",
        log__curves="false",
        optimizer__lr_decay_style="constant",
        checkpoint__save_every_minutes=0.01,
    )
    kill_forked_when(lambda: has_gone_on(folder), [str(CONFIG), *arguments], environment(), 1, timeout=300)
    checkpoint = sorted((folder / "checkpoints").glob("step_??????"))[-1]
    step = int(checkpoint.name.removeprefix("step_"))
    assert 0 < step < 400
    done = train([*arguments, *flags(run__num_steps=step + 2)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed  {checkpoint} (step {step}," in done.stdout
    assert [record["step"] for record in step_records(folder)] == list(range(1, step + 3))


def test_without_space_a_save_by_time_is_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    """Only the last save, which needs no more space then, must succeed."""
    (tmp_path / "sitecustomize.py").write_text(NO_SPACE)
    arguments = flags(
        run__output_dir=tmp_path / "run",
        run__num_steps=30,
        parallel__expert_model_parallel_size=1,
        rollout__prompts_per_step=2,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=4,
        eval__every=0,
        eval__max_prompts=4,
        log__tensorboard="false",
        log__curves="false",
        checkpoint__save_every_minutes=0.001,
    )
    done = train(arguments, extra_path=tmp_path, torchrun=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning  no checkpoint by time: a checkpoint needs about" in done.stdout
    assert re.findall(r"saved    .*/(step_\d+)\n", done.stdout)[-1] == "step_000030"


NO_SPACE = """
import shutil, sys
real = shutil.disk_usage

def disk_usage(path):
    # Full while the run trains: from the first record of a step until the last one.
    import pathlib
    metrics = pathlib.Path(__file__).parent / "run/metrics.jsonl"
    steps = metrics.read_text().count("train/loss") if metrics.exists() else 0
    return real(path)._replace(free=2_000_000) if 0 < steps < 30 else real(path)

shutil.disk_usage = disk_usage
"""
