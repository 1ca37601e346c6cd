"""A run that is killed and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron_dppo.commands.main import train_main
from megatron_dppo.hf.weight_files import FolderWeights
from tests.e2e.runs import CONFIG, command, environment, flags, from_base, kill_when_exists, train, without_timings
from tests.reference_run import assert_different_folders, assert_trains

pytestmark = pytest.mark.e2e

STEPS = 5


@pytest.fixture(scope="module")
def run_flags(base_model: Path) -> list[str]:
    return from_base(
        base_model,
        run__num_steps=STEPS,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        eval__max_prompts=16,
        eval__every=2,
        eval__samples_per_prompt=2,
        eval__temperature=0.7,
        rollout__dynamic_sampling="true",
        rollout__max_refills=2,
        train__mask_truncated="true",
        train__layer_noise__std=1e-4,
        train__layer_noise__lr=0.05,
        checkpoint__save_every=1,
        checkpoint__keep=2,
        log__curves="false",
    )


@pytest.fixture(scope="module")
def uninterrupted(run_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "uninterrupted"
    result = train([*run_flags, *flags(run__output_dir=folder)], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def assert_same_run(actual: Path, expected: Path) -> None:
    assert_trains(expected)
    assert_different_folders(actual, expected)
    assert without_timings(actual) == without_timings(expected)
    weights, reference = FolderWeights(actual / "hf"), FolderWeights(expected / "hf")
    assert weights.names() == reference.names()
    assert all(torch.equal(weights[name], reference[name]) for name in reference.names())


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(arguments, processes=2),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.002)


def test_dynamic_sampling_replaced_groups_without_signal(uninterrupted: Path) -> None:
    """More prompts were drawn than 4 a step, and few groups without signal are left."""
    state = json.loads((uninterrupted / "checkpoints/step_000005/state.json").read_text())
    assert state["stream"]["cursor"] > 4 * STEPS
    steps = [r for r in without_timings(uninterrupted) if "rollout/groups_without_signal" in r]
    assert sum(r["rollout/groups_without_signal"] for r in steps) / len(steps) < 0.3
    noise = [r["train/layer_noise"] for r in steps if "train/layer_noise" in r]
    assert len(set(noise)) == STEPS and all(5e-5 < value < 2e-4 for value in noise), "the noise is learned"
    assert all(r["eval/accuracy"] == r["eval/pass_at_1"] <= r["eval/pass_at_2"] for r in steps if "eval/accuracy" in r)


def test_a_dry_run_says_from_which_checkpoint_the_run_would_go_on(
    run_flags: list[str], uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest, the one before where that is damaged, and what is wrong where none is left; nothing is touched."""
    shutil.copytree(uninterrupted, tmp_path / "run")
    arguments = [str(CONFIG), *run_flags, *flags(run__output_dir=tmp_path / "run"), "--dry-run", "--world-size", "2"]

    def dry(*more: str) -> tuple[int, str]:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        code = train_main([*arguments, *more])
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    def damage(step: int) -> None:
        file = next((tmp_path / f"run/checkpoints/step_{step:06}").glob("__0_0.distcp"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    checkpoints = tmp_path / "run/checkpoints"
    code, said = dry("--log.rollouts_every", "1")
    assert code == 0 and f"resume   from {checkpoints}/step_000005\n         changed: log.rollouts_every" in said, said
    code, said = dry("--train.epochs", "3")
    assert code == 2 and "step_000005 is from a run with other settings" in said and "train.epochs" in said, said
    damage(5)
    code, said = dry()
    assert code == 0 and f"resume   from {checkpoints}/step_000004\n" in said, said
    assert "step_000005 is skipped: __0_0.distcp has other content" in said, said
    damage(4)
    code, said = dry()
    assert code == 2 and "step_000005: __0_0.distcp" in said and "step_000004: __0_0.distcp" in said, said


@pytest.mark.long
def test_killed_in_mid_save_and_resumed_equals_uninterrupted(
    run_flags: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    arguments = [*run_flags, *flags(run__output_dir=tmp_path / "run")]
    kill_when_exists(tmp_path / "run/checkpoints/step_000003.partial", arguments)
    saved = {p.name for p in (tmp_path / "run/checkpoints").iterdir()}
    assert "step_000002" in saved and "step_000003" not in saved, saved
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(step 2, policy version 4)" in result.stdout
    assert_same_run(tmp_path / "run", uninterrupted)
    assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {"step_000004", "step_000005"}


@pytest.mark.long
def test_a_run_continues_on_another_layout_and_with_another_learning_rate(run_flags: list[str], tmp_path: Path) -> None:
    """Tensor parallel 2 to one process, same data-parallel size: same prompts, and rewards that differ by rounding."""
    arguments = [*run_flags, *flags(run__output_dir=tmp_path / "run", parallel__expert_model_parallel_size=1)]
    first = train([*arguments, *flags(run__num_steps=2, parallel__tensor_model_parallel_size=2)], processes=2)
    assert first.returncode == 0, first.stderr
    rate = flags(optimizer__lr=0.001, optimizer__lr_decay_style="constant", optimizer__lr_warmup_steps=0)
    second = train([*arguments, *rate, *flags(run__num_steps=3, checkpoint__accept_changes="true")])
    assert second.returncode == 0, second.stderr
    assert "on another layout" in second.stdout and "run.num_steps: 2 -> 3" in second.stdout
    written = without_timings(tmp_path / "run")
    assert [r["step"] for r in written] == [0, 1, 2, 3]
    assert written[3]["train/learning_rate"] == 0.001 > 2 * written[2]["train/learning_rate"]


def test_sigterm_saves_and_the_next_run_continues(run_flags: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    """With saves in the background, which the end of either run waits for."""
    more = flags(run__output_dir=tmp_path / "run", checkpoint__save_every=2, checkpoint__async_save="true")
    arguments = [*run_flags, *more]
    process = start(arguments)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(metrics, process)
    while len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert "stopped  by SIGTERM after step" in output, output
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert int(names[-1].removeprefix("step_")) < STEPS  # no .partial is left
    assert f"after step {int(names[-1].removeprefix('step_'))}. Rerun" in output, (names, output)
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_job_that_ends_before_another_step_fits_is_saved_and_the_next_one_continues(
    run_flags: list[str], uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal comes. The limit has passed, so each start does one step."""
    arguments = [*run_flags, *flags(run__output_dir=tmp_path / "run", checkpoint__save_every=100)]
    monkeypatch.setenv("MEGATRON_DPPO_END_TIME", "1")
    for step in (1, 2):
        result = train(arguments, processes=2)
        assert result.returncode == 1, "torchrun's code for any other than 0"
        assert f"stopped  by the job's time limit after step {step}. Rerun" in result.stdout, result.stdout
        assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1] == f"step_{step:06d}"
    monkeypatch.setenv("MEGATRON_DPPO_END_TIME", str(time.time() + 86400))
    result = train(arguments, processes=2)
    assert result.returncode == 0 and "stopped" not in result.stdout, result.stdout + result.stderr
    assert_same_run(tmp_path / "run", uninterrupted)

    # A process of its own shows the code. The last step has no next one that must fit.
    alone = [
        *run_flags,
        *flags(run__output_dir=tmp_path / "alone", run__num_steps=2, parallel__expert_model_parallel_size=1),
    ]
    monkeypatch.setenv("MEGATRON_DPPO_END_TIME", "1")
    assert [train(alone).returncode for _ in range(2)] == [6, 0]


@pytest.mark.long
def test_a_fork_at_a_step_is_the_run_from_there_on(run_flags: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    """With the same settings bit for bit; with other settings and prompts from the same weights; the source stays."""
    source = uninterrupted / "checkpoints/step_000004"
    before = {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.is_file()}
    arguments = [*run_flags, *flags(checkpoint__fork_from=source)]
    same = train([*arguments, *flags(run__output_dir=tmp_path / "same")], processes=2)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "forked " in same.stdout and "(step 4, policy version 8)" in same.stdout
    expected = [record for record in without_timings(uninterrupted) if record["step"] > 4]
    assert without_timings(tmp_path / "same") == expected
    weights, reference = FolderWeights(tmp_path / "same/hf"), FolderWeights(uninterrupted / "hf")
    assert all(torch.equal(weights[name], reference[name]) for name in reference.names())

    other = flags(run__output_dir=tmp_path / "other", run__seed=7, optimizer__lr=0.001, run__num_steps=6)
    changed = train([*arguments, *other], processes=2)
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert "on other prompts, or in another order" in changed.stdout and "changed: optimizer.lr" in changed.stdout
    assert [r["step"] for r in without_timings(tmp_path / "other")] == [5, 6]
    second = train([*arguments, *other, *flags(run__num_steps=7)], processes=2)
    assert second.returncode and "is from a run with other settings" in second.stderr, "from its own checkpoint now"
    assert before == {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.is_file()}
