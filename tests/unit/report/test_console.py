"""The live view, the alarms, and what trackers are told; the trackers' packages are stand-ins that note their calls."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.report import sinks
from megatron_dppo.report.console import Console, format_step_line, idle_fraction, live_rows
from megatron_dppo.report.findings import LearningWarnings
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.page.charts import build_charts
from megatron_dppo.report.sinks import require_sinks
from megatron_dppo.report.trackers import RunLabels, flatten, open_trackers, run_id

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
    rows = dict(live_rows(console._values, "score"))
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


def test_each_folder_has_a_stable_tracker_id(tmp_path: Path) -> None:
    a, b = tmp_path / "a/run", tmp_path / "b/run"
    for folder in (a, b):
        folder.mkdir(parents=True)
    first = run_id(a, "wandb")
    assert first == run_id(a, "wandb") != run_id(b, "wandb") and first.isalnum() and len(first) == 32
    assert run_id(a, "comet_ml") != first
    older = tmp_path / "older"
    (older / "wandb").mkdir(parents=True)
    assert run_id(older, "wandb") == "older"


def test_wandb_receives_id_name_group_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setattr(sinks, "require_wandb", lambda project: wandb)
    labels = RunLabels(project="p", name="n", group="g", tags=("x", "y"), offline=True)
    for step in (None, 3):
        MetricsWriter(
            tmp_path, {"a": 1}, tensorboard=False, wandb_project="p", resumed_step=step, labels=labels
        ).close()
    assert calls[0] == calls[1], "a resumed run goes on in the same curve"
    own = {key: calls[0][key] for key in ("project", "name", "group", "tags", "mode", "resume")}
    assert own == {"project": "p", "name": "n", "group": "g", "tags": ["x", "y"], "mode": "offline", "resume": "allow"}
    assert calls[0]["id"] == run_id(tmp_path, "wandb") != tmp_path.name


def stand_in(name: str, calls: list[tuple[str, Any]]) -> ModuleType:
    """What accelerate calls of a tracker's package; the call names are those of the released packages."""
    module = ModuleType(name)

    def note(what: str, result: Any = None) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((what, options | ({"args": args} if args else {})))
            return result

        return call

    names = ("log", "finish", "log_metric", "log_metrics", "set_step", "log_parameters", "end", "set_name", "add_tags")
    run = SimpleNamespace(**{each: note(each) for each in names}, info=SimpleNamespace(run_id="given by mlflow"))
    module.__dict__.update(
        init=note("init", run), start=note("start", run), config=SimpleNamespace(update=note("config"))
    )
    module.__dict__.update(search_experiments=note("search", []), create_experiment=note("create", "7"))
    module.__dict__.update(start_run=note("start_run", run), log_params=note("log_params"), end_run=note("end_run"))
    module.__dict__.update(log_metrics=note("log_metrics"), __version__="3.50.0", __spec__=object())
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    module.__dict__.update(utils=SimpleNamespace(validation=limits))
    return module


@pytest.mark.parametrize("name", ["trackio", "comet_ml", "mlflow"])
def test_trackers_are_started_once_and_continued(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    calls: list[tuple[str, Any]] = []
    monkeypatch.setitem(sys.modules, name, stand_in(name, calls))
    labels = RunLabels(project="p", name="n", group="g", tags=("x",))
    begins = {"trackio": "init", "comet_ml": "start", "mlflow": "start_run"}[name]
    for step in (None, 1):
        sink = MetricsWriter(
            tmp_path,
            {"loss": {"topk": 20}},
            tensorboard=False,
            wandb_project=None,
            resumed_step=step,
            trackers=[name],
            labels=labels,
        )
        sink.write(step or 0, {"a/b": 0.5, "nan": math.nan})
        sink.close()
    started = [options for what, options in calls if what == begins]
    assert len(started) == 2
    ids = json.loads((tmp_path / "trackers.json").read_text())
    if name == "trackio":
        assert started[0] == started[1] and started[0]["project"] == "p" and started[0]["resume"] == "allow"
        assert started[0]["name"] == f"n-{ids['trackio'][:8]}" and started[0]["group"] == "g"
    elif name == "comet_ml":
        assert started[0] == started[1] and started[0]["experiment_key"] == ids["comet_ml"]
    else:
        assert [s["run_id"] for s in started] == [None, "given by mlflow"] and started[0]["run_name"] == "n"
        assert [what for what, _ in calls].count("log_params") == 1, "MLflow refuses to change a parameter"
    logged = str([options for what, options in calls if what.startswith("log")])
    assert "a/b" in logged and "nan" not in logged


def test_missing_packages_are_named_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"log.trackers = \['swanlab'\] needs swanlab: pip install swanlab"):
        require_sinks(tensorboard=False, wandb_project=None, trackers=["swanlab"])
    assert open_trackers([], Path("."), RunLabels(project="p", name="n"), {}) == []


def test_a_configuration_is_flattened_to_one_table() -> None:
    assert flatten({"a": {"b": 1, "c": None, "d": [1, 2]}, "e": True}) == {"a.b": 1, "a.d": "[1, 2]", "e": True}


def test_megatron_warnings_are_silent_unless_enabled_and_others_are_shown() -> None:
    code = (
        "import warnings\n"
        "from megatron_dppo.mcore.compat.shims import apply_shims\n"
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
