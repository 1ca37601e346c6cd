from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.report.console import Console, format_step_line
from megatron_dppo.report.curves import write_curves
from megatron_dppo.report.records import before_after_table, compare_responses, list_output_files, summarize

STEPS = 24
RUN: dict[str, Any] = {"world_size": 2, "layout": "tp1 dp2", "policy_updates": 48, "total_seconds": 61.239}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 24 steps: step s has reward s / 100; each takes 2 seconds for 300 tokens."""
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.125}]
    for step in range(1, STEPS + 1):
        record = {"step": step, "rollout/reward": step / 100, "perf/step_seconds": 2.0, "perf/tokens": 300.0}
        record |= {"rollout/response_length": 10.0 + step, "train/abs_prob_diff": None, "train/mask_fraction": 0.01}
        record |= {"train/entropy": 1 / step}
        records.append(record | ({"eval/accuracy": step / 25} if step % 10 == 0 or step == STEPS else {}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_a_step_line_shows_what_was_measured_and_a_dash_elsewhere() -> None:
    values = {
        "rollout/reward": 0.3456,
        "eval/accuracy": 0.5,
        "train/mask_fraction": 0.0123,
        "train/abs_prob_diff": 0.00123,
        "train/entropy": 1.25,
        "perf/tokens_per_second": 12345.6,
    }
    line = format_step_line(7, 100, values)
    cells = "step 7/100 reward 0.346 held-out 0.500 masked 1.23% |pi-mu| 0.0012 entropy 1.250 tok/s 12,346"
    assert " ".join(line.split()) == cells
    assert line.startswith("step   7/100  ")
    del values["eval/accuracy"]
    assert "held-out - " in format_step_line(7, 100, values) and not format_step_line(7, 100, {}).endswith(" ")


def test_a_step_line_shows_failed_agents_with_their_first_error_apart_from_failed_rewards() -> None:
    values = {"rollout/reward_failed_fraction": 0.5, "rollout/agent/failed_fraction": 0.25}
    assert format_step_line(1, 9, values, "agent.py ended:\n no tool").endswith(
        "  rewards failed 25%  agents failed 25%: agent.py ended: no tool"
    )
    values["rollout/agent/failed_fraction"] = 0.5
    assert "rewards failed" not in format_step_line(1, 9, values, "x" * 999)
    assert len(format_step_line(1, 9, values, "x" * 999)) < 350


def test_columns_of_steps_with_and_without_an_evaluation_line_up() -> None:
    with_evaluation = format_step_line(10, 100, {"rollout/reward": 0.5, "eval/accuracy": 0.5})
    without = format_step_line(9, 100, {"rollout/reward": 0.25})
    assert with_evaluation.index("masked") == without.index("masked")


def test_only_an_enabled_console_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (True, False):
        console = Console(enabled)
        console.start("training", 2)
        console.step(1, 2, {"rollout/reward": 0.5})
        console.finish()
        assert ("reward 0.500" in capsys.readouterr().out) == enabled


def test_a_lost_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    console = Console(True)
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        console.print("first")
        console.print("second")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def test_the_summary_has_the_numbers_of_the_run(folder: Path) -> None:
    summary = summarize(folder, **RUN)
    assert summary == {
        "eval_before": 0.125,
        "eval_after": 0.96,
        "reward_first": 0.01,
        "reward_last": pytest.approx(0.195),  # steps 15 to 24
        "train_seconds": 48.0,
        "total_seconds": 61.24,
        "world_size": 2,
        "layout": "tp1 dp2",
        "policy_updates": 48,
        "tokens_per_second": 150.0,
    }
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_summary_of_a_run_without_steps_or_evaluations_has_nulls(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    summary = summarize(tmp_path, **RUN)
    unknown = ("eval_before", "eval_after", "reward_first", "reward_last", "tokens_per_second")
    assert all(summary[key] is None for key in unknown) and summary["train_seconds"] == 0


def test_the_table_compares_the_first_value_with_the_last(folder: Path) -> None:
    rows = [line.rsplit(maxsplit=2) for line in before_after_table(folder).splitlines()]
    assert rows == [
        ["before", "after"],
        ["held-out accuracy (greedy)", "0.125", "0.96"],
        ["training reward", "0.01", "0.195"],
        ["response length", "11", "29.5"],
        ["entropy", "1", "0.05244"],  # the mean of 1 / s for s = 15 to 24
    ]  # the distance is null throughout


def test_responses_before_and_after_are_listed_below_their_problem() -> None:
    before = [{"prompt": "1+1=", "label": "2", "response": "\\boxed{3}", "reward": 0.0}]
    after = [before[0] | {"response": "1+1=2 \\boxed{2}", "reward": 1.0}]
    assert compare_responses(before, after).splitlines() == [
        "  1+1=   (answer: 2)",
        "    before  wrong \\boxed{3}",
        "    after   right 1+1=2 \\boxed{2}",
    ]


def test_only_files_that_exist_are_listed(folder: Path) -> None:
    (folder / "hf").mkdir()
    lines = list_output_files(folder).splitlines()
    assert [line.split()[0] for line in lines] == [str(folder / "metrics.jsonl"), str(folder / "hf")]


def test_the_curves_are_a_png_wide_enough_for_all_panels(folder: Path) -> None:
    picture = folder / "curves.png"
    write_curves(folder / "metrics.jsonl", picture, "a title")
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1430, 572)  # 13 x 5.2 inches at 110 dots


def test_the_curves_draw_the_recorded_points_and_show_negative_rewards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    write_curves(folder / "metrics.jsonl", folder / "curves.png", "a title")
    reward, distance, masked, entropy, length = figures[0].axes
    training, held_out = reward.lines
    assert list(training.get_xdata()) == list(range(1, 25))
    assert list(training.get_ydata()) == [step / 100 for step in range(1, 25)]
    assert list(held_out.get_xdata()) == [0, 10, 20, 24] and list(held_out.get_ydata()) == [0.125, 0.4, 0.8, 0.96]
    assert set(masked.lines[0].get_ydata()) == {1.0}  # percent
    assert list(entropy.lines[0].get_ydata()) == [1 / step for step in range(1, 25)]
    assert len(distance.lines[0].get_xdata()) == 0  # null values are no points
    assert reward.get_ylim()[0] == length.get_ylim()[0] == 0

    (folder / "negative.jsonl").write_text('{"step": 1, "rollout/reward": -0.5}\n{"step": 2, "rollout/reward": 0.5}\n')
    write_curves(folder / "negative.jsonl", folder / "curves.png", "a title")
    assert figures[1].axes[0].get_ylim()[0] < -0.5
    monkeypatch.undo()
    for figure in figures:
        plt.close(figure)
