"""The live view, the learning warnings, and the warnings of other packages."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.report.console import Console, format_step_line, idle_fraction, live_rows
from megatron_dppo.report.findings import LearningWarnings
from megatron_dppo_report.charts import build_charts

VALUES = {
    "rollout/reward": 0.25,
    "rollout/groups_without_signal": 0.5,
    "train/mask_fraction": 0.031,
    "perf/step_seconds": 10.0,
    "perf/waiting_seconds": 1.0,
    "perf/prefetch_wait_seconds": 2.0,
    "perf/tokens_per_second": 4321.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_view_shows_the_newest_step_and_the_newest_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    console = Console(True, eval_score_name="score")
    console.start("training", 20, 4)
    console.step(5, 20, VALUES | {"eval/accuracy": 0.75})
    console.step(6, 20, VALUES | {"rollout/reward": 0.5})
    console.print("a [line] of {text}")
    rows = dict(live_rows(console.values, "score"))
    console.finish()
    shown = screen.getvalue()
    assert rows["held-out score"] == "0.750" and rows["reward"] == "0.500"
    assert "held-out score" in shown and "groups without signal" in shown and "6/20" in shown
    assert "a [line] of {text}" in shown and "step  6/20  reward 0.500" in shown


def test_the_line_and_the_page_show_the_greedy_baseline_of_remax() -> None:
    values = VALUES | {"rollout/greedy_reward": 0.625}
    assert format_step_line(3, 20, values).endswith("tok/s 4,321  greedy 0.625")
    assert "greedy" not in format_step_line(3, 20, VALUES)
    reward = next(chart for chart in build_charts([{"step": 3, **values}]) if chart["title"] == "Reward")
    assert [(line["label"], line["points"]) for line in reward["lines"]] == [
        ("training", [[3, 0.25]]),
        ("greedy", [[3, 0.625]]),
    ]


def test_a_missing_measurement_is_a_dash() -> None:
    rows = dict(live_rows(VALUES, "accuracy"))
    assert rows == {
        "reward": "0.250",
        "held-out accuracy": "-",
        "groups without signal": "50%",
        "tokens masked": "3.10%",
        "trainer idle": "30%",
        "tokens per second": "4,321",
    }
    assert idle_fraction({}) is None


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        ({}, "accuracy"),
        ({"function": "reasoning_gym"}, "accuracy"),
        ({"function": "reasoning_gym", "partial_credit": True}, "score"),
        ({"function": "words"}, "score"),
        ({"functions": {"a": {"function": "math"}}}, "score"),
    ],
)
def test_only_a_mean_of_right_and_wrong_is_called_accuracy(reward: dict[str, Any], name: str) -> None:
    assert RewardConfig(**reward).eval_score_name == name


def test_missing_signal_and_a_constant_reward_are_reported_once() -> None:
    alarms = LearningWarnings()
    silent = {"rollout/groups_without_signal": 1.0}
    told = [alarms.check_step(silent | {"rollout/reward": r}) for r in (0, 1, 0, 1, 0, 1)]
    assert [len(texts) for texts in told] == [0, 0, 1, 0, 0, 0] and "rollout.samples_per_prompt" in told[2][0]
    alarms = LearningWarnings()
    told = [alarms.check_step({"rollout/groups_without_signal": 0.9, "rollout/reward": 0.0}) for _ in range(25)]
    assert [i for i, texts in enumerate(told) if texts] == [9] and "reward was 0 in each of 10" in told[9][0]
    alarms = LearningWarnings()
    assert not any(alarms.check_step({"rollout/groups_without_signal": 1.0 - (i % 3 == 2)}) for i in range(30))
    assert not any(alarms.check_step({"rollout/reward": 0.1 * (i % 10 == 9)}) for i in range(30))
    taught = LearningWarnings(has_reward_signal=False)
    assert not any(taught.check_step(silent | {"rollout/reward": 0.0}) for _ in range(30))


def test_megatron_warnings_are_silent_unless_enabled_and_others_are_shown() -> None:
    code = (
        "import warnings\n"
        "from megatron_dppo.mcore.shims import apply_shims\n"
        "from megatron_dppo.parallel.platform import Platform\n"
        "apply_shims(Platform.detect(force_cpu=True))\n"
        "import megatron.core.optimizer\n"
        "warnings.warn('mine')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    for asked, loud in (([], False), (["-Wdefault"], True)):
        command = [sys.executable, *asked, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
        assert "UserWarning: mine" in done.stderr
        assert ("megatron/core" in done.stderr) == loud, done.stderr
