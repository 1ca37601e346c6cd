"""Requeueing of a job: attempts in a row, progress, and the rank whose exit caused the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.errors import ConfigError
from megatron_dppo.process.restarts import AttemptsExhausted, RankExit, Restarts, find_first_failure

CONFIG = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def save(run: Path, step: int) -> None:
    (run / f"checkpoints/step_{step:06d}").mkdir()


def restarts(run: Path, limit: int = 3) -> Restarts:
    """Return a new object each time, as each attempt is a new process."""
    return Restarts(run.parent / "shared/restarts-7.json", run, limit)


def crash(run: Path, limit: int = 3) -> str:
    restarts(run, limit).begin()
    return restarts(run, limit).crashed("crashed")


def test_the_number_of_restarts_from_one_checkpoint_is_limited(run: Path) -> None:
    save(run, 12)
    for left in (3, 2, 1):
        assert crash(run).endswith(f"resumes from the checkpoint of step 12, {left} more attempts from there")
    with pytest.raises(AttemptsExhausted, match=r"4 attempts .*step 12 .*max-restarts 3"):
        crash(run)


def test_only_a_newer_complete_checkpoint_resets_the_count(run: Path) -> None:
    save(run, 4)
    for _ in range(3):
        crash(run)
    save(run, 6)
    assert "step 6, 3 more" in crash(run)
    (run / "checkpoints/step_000006").rename(run / "checkpoints/step_000006.damaged")
    (run / "checkpoints/step_000009.partial").mkdir()
    assert "step 6, 2 more" in crash(run)
    save(run, 6)  # reached once more
    assert "step 6, 1 more" in crash(run)
    with pytest.raises(AttemptsExhausted):
        crash(run)


def test_a_limit_of_zero_forbids_restarts_but_not_stops(run: Path) -> None:
    with pytest.raises(AttemptsExhausted, match="1 attempts in a row"):
        crash(run, limit=0)
    save(run, 1)
    for _ in range(3):
        restarts(run, 0).begin()
        restarts(run, 0).stopped()
    restarts(run, 0).begin()
    with pytest.raises(AttemptsExhausted, match="was stopped; 4 attempts"):
        restarts(run, 0).stopped()


def test_a_node_failure_counts_as_a_crash_and_a_preemption_does_not_count(run: Path) -> None:
    assert restarts(run).begin() == ""
    assert (
        "without recording its exit, as after a node failure; resuming from the beginning, attempt 2"
        in restarts(run).begin()
    )
    restarts(run).preempted()
    assert restarts(run).begin().startswith("resuming from the beginning, attempt 2")
    assert "attempt 3" in restarts(run).begin() and "attempt 4" in restarts(run).begin()
    with pytest.raises(AttemptsExhausted, match="4 attempts"):
        restarts(run).begin()


def test_a_damaged_record_raises_an_error_with_its_path(run: Path) -> None:
    crash(run)
    (run.parent / "shared/restarts-7.json").write_text('{"ends": 1}')
    with pytest.raises(ConfigError, match=r"restarts-7.json is damaged"):
        restarts(run).begin()


def test_the_first_failure_is_a_final_exit_code_or_else_the_earliest_exit(tmp_path: Path) -> None:
    assert find_first_failure(tmp_path, 137) == RankExit(137)
    for rank, code, second in ((0, 1, 20), (12, 134, 10), (3, 1, 30)):
        (tmp_path / f"code_{rank}").write_text(f"{code}\n")
        os.utime(tmp_path / f"code_{rank}", (second, second))
    assert find_first_failure(tmp_path, 137) == RankExit(134, 12)
    (tmp_path / "code_5").write_text("3\n")
    assert find_first_failure(tmp_path, 137) == RankExit(3, 5)
    (tmp_path / "code_7").write_text("2\n")
    assert find_first_failure(tmp_path, 137) == RankExit(2, 7)


def test_the_command_prints_the_exit_code_and_the_last_lines_of_the_failed_rank(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(run, 5)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/code_3").write_text("134\n")
    (tmp_path / "logs/rank_3.log").write_text("".join(f"line {i}\n" for i in range(100)))

    def call(event: str, *more: str, limit: int = 1) -> tuple[int, str]:
        record = ["--record", str(tmp_path / "record"), "--max-restarts", str(limit)]
        code = main(["restarts", event, str(CONFIG), "--run.output_dir", str(run), *record, *more])
        return code, "".join(capfd.readouterr())

    logs = ["--exit-code", "137", "--logs", str(tmp_path / "logs")]
    assert call("begin") == (0, "")
    code, output = call("crashed", *logs)
    assert code == 0 and "  | line 99\n" in output and "line 69" not in output
    where = f"the job has crashed with exit code 134 of rank 3 (logs: {tmp_path / 'logs'})"
    assert f"launch: {where}; it resumes from the checkpoint of step 5, 1 more attempts" in output
    assert call("begin") == (0, "launch: resuming from the checkpoint of step 5, attempt 2 from there\n")
    code, output = call("crashed", *logs)
    assert code == 134 and f"launch: {where}; 2 attempts in a row ended without anything newer than" in output
    (tmp_path / "logs/code_0").write_text("2\n")
    code, output = call("crashed", *logs, limit=9)
    assert code == 2 and "a restart would fail in the same way" in output
    code, output = call("begin", limit=-1)
    assert code == 2 and "--max-restarts -1: expected 0 (never) or more" in output


def test_the_command_does_not_import_torch(run: Path) -> None:
    program = (
        "import sys\nfrom megatron_dppo.commands.main import main\n"
        f"main(['restarts', 'begin', {str(CONFIG)!r}, '--record', {str(run / 'r')!r}, '--max-restarts', '1'])\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (run / "r").exists(), done.stderr
