"""No traceback, no hang, nothing executed and nothing outside touched by looking at a folder that others wrote."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.errors import ConfigError
from megatron_dppo.run.policy_setup import warmup_from_config
from megatron_dppo.run.warmup import mark_warm
from megatron_dppo.setup.starts import load_run_config
from megatron_dppo_doctor.diagnose.run import load_diagnosed_config
from tests.unit.commands.hostile_runs import HostileRuns

NUM_CASES = 10_000


def check_cases(root: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    problems = []
    commands = Counter[str]()
    for number, with_functions in enumerate((False, True)):
        folder = root / f"cases{number}"
        folder.mkdir()
        os.chdir(folder)
        runs = HostileRuns(folder, with_functions=with_functions)
        for _ in range(count // 2):
            try:
                commands[runs.check(chance)] += 1
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, f"{len(problems)} of {count}: " + "\n".join(problems[:20])
    assert len(commands) >= 8, commands


@pytest.mark.slow
def test_a_sample_of_mutated_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_cases(tmp_path, 60, seed=1)


@pytest.mark.long
def test_ten_thousand_mutated_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_cases(tmp_path, NUM_CASES, seed=0)


@pytest.mark.parametrize("command", ["report", "eval", "generate", "replay", "diagnose", "serve"])
def test_an_intact_run_with_evil_functions_executes_none(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = HostileRuns(tmp_path, with_functions=True)
    runs.write()
    code = runs.commands()[command]()
    assert code == (0 if command in ("report", "serve") else 2) and not runs.trace.exists()
    said = capsys.readouterr().err
    assert command in ("report", "serve", "replay") or "add --run-functions" in said, said


def test_a_diagnosis_never_begins_a_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not without ``base/`` beside a checkpoint, and not because an override makes it another warm-up."""
    monkeypatch.chdir(tmp_path)
    runs = HostileRuns(tmp_path, with_functions=False)
    runs.write()
    before = sorted(runs.run.rglob("*"))
    assert main(["diagnose", "run"]) == 2 and sorted(runs.run.rglob("*")) == before
    assert "a diagnosis trains nothing" in capsys.readouterr().err
    (runs.run / "base").mkdir()
    mark_warm(runs.run / "base", warmup_from_config(load_run_config(runs.run, [])), runs.run / "checkpoints")
    assert load_diagnosed_config(runs.run, []).warmup.num_steps > 0
    assert load_diagnosed_config(runs.run, ["--rollout.temperature", "0.5"]).rollout.temperature == 0.5
    for override in ("--warmup.num_steps=3", "--train.micro_batch_tokens=77", "--run.seed=99"):
        with pytest.raises(ConfigError, match="a diagnosis trains nothing"):
            load_diagnosed_config(runs.run, [override])
