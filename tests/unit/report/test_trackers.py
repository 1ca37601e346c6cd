"""Trackers get one curve per folder, also over resumes. Stand-ins of the packages note their calls.

``make test-plugins`` runs the last test with the real packages.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.report import sinks
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.sinks import Sink, open_sinks, require_sinks
from megatron_dppo.report.trackers import IDS, LOGGED_STEPS, LoggedSteps, RunLabels, flatten, open_trackers, run_id
from megatron_dppo.setup.run_folder import RUN_FILES

LOG: dict[str, Any] = {"tensorboard": False, "project": "p"}


def test_each_folder_has_a_stable_tracker_id(tmp_path: Path) -> None:
    a, b = tmp_path / "a/run", tmp_path / "b/run"
    for folder in (a, b):
        folder.mkdir(parents=True)
    first = run_id(a, "wandb")
    assert first == run_id(a, "wandb") != run_id(b, "wandb") and first.isalnum() and len(first) == 32
    assert run_id(a, "comet_ml") != first


def test_wandb_receives_id_name_group_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setattr(sinks, "require_wandb", lambda project: wandb)
    log = LogConfig(tensorboard=False, wandb_project="p", name="n", group="g", tags=["x", "y"], offline=True)
    for step in (None, 3):
        MetricsWriter(tmp_path, {"a": 1}, log, resumed_step=step).close()
    assert calls[0] == calls[1], "a resumed run goes on in the same curve"
    own = {key: calls[0][key] for key in ("project", "name", "group", "tags", "mode", "resume")}
    assert own == {"project": "p", "name": "n", "group": "g", "tags": ["x", "y"], "mode": "offline", "resume": "allow"}
    assert calls[0]["id"] == run_id(tmp_path, "wandb") != tmp_path.name


def stand_in(name: str, calls: list[tuple[str, Any]]) -> ModuleType:
    """Return what accelerate calls of a tracker's package; the call names are those of the released packages."""
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
    log = LogConfig.model_validate(LOG | {"trackers": [name], "name": "n", "group": "g", "tags": ["x"]})
    begins = {"trackio": "init", "comet_ml": "start", "mlflow": "start_run"}[name]
    for step in (None, 1):
        sink = MetricsWriter(tmp_path, {"loss": {"topk": 20}}, log, resumed_step=step)
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
    with pytest.raises(ConfigError, match=r"log.trackers = \['swanlab'\]"):
        require_sinks(LogConfig(tensorboard=False, trackers=["swanlab"]))
    assert open_trackers([], Path("."), RunLabels(project="p", name="n"), {}) == []


def test_a_configuration_is_flattened_to_one_table() -> None:
    assert flatten({"a": {"b": 1, "c": None, "d": [1, 2]}, "e": True}) == {"a.b": 1, "a.d": "[1, 2]", "e": True}


class Drawn:
    """A tracker that draws all that it gets: (run, metric, step, value)."""

    shows_tables = True

    def __init__(self, points: list[tuple[str, str, int, object]], run: str) -> None:
        self._points = points
        self._run = run

    def log(self, values: dict[str, float], step: int) -> None:
        self._points += [(self._run, name, step, value) for name, value in values.items()]

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self._points.append((self._run, name, step, rows))

    def finish(self) -> None:
        pass


def attempt(folder: Path, steps: range, resumed: int | None, value: float) -> None:
    """Log some steps as a run does: an evaluation of a step beside its metrics, and a table."""
    (sink,) = open_sinks(folder, {}, LogConfig(tensorboard=False, wandb_project="p", name="n"), resumed)
    for step in steps:
        sink.log({"reward": value, "loss": value}, step)
        if step % 2 == 0:
            sink.log({"eval": value}, step)
            sink.log_table("answers", ["a"], [[value]], step)
    sink.finish()


def test_a_curve_has_each_step_once_over_all_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points: list[tuple[str, str, int, object]] = []

    def draw(project: str, folder: Path, config: object, labels: RunLabels) -> Sink:
        return Drawn(points, run_id(folder, "wandb"))

    monkeypatch.setattr(sinks, "WandbSink", draw)
    attempt(tmp_path, range(1, 6), None, 1.0)
    attempt(tmp_path, range(3, 5), 2, 2.0)  # interrupted again before it is new
    attempt(tmp_path, range(4, 9), 3, 3.0)
    attempt(tmp_path, range(9, 10), 8, 4.0)
    drawn = [(name, step) for _, name, step, _ in points]
    assert len(drawn) == len(set(drawn)) and len({run for run, *_ in points}) == 1
    assert [step for name, step in drawn if name == "reward"] == list(range(1, 10))
    assert [step for name, step in drawn if name in ("eval", "answers")] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert [value for _, name, _, value in points if name == "loss"] == [1.0] * 5 + [3.0] * 3 + [4.0]
    notes = [line for line in capsys.readouterr().err.splitlines() if "wandb keeps" in line]
    assert ["3 to 5" in notes[0], "4 to 5" in notes[1], len(notes)] == [True, True, 2]
    # A metric that the interrupted attempt did not reach is not held back with the others of its step.
    points.clear()
    (sink,) = open_sinks(tmp_path, {}, LogConfig(tensorboard=False, wandb_project="p", name="n"), 8)
    sink.log({"reward": 5.0, "late": 5.0}, 9)
    assert [name for _, name, *_ in points] == ["late"]


def test_a_run_that_begins_again_at_step_0_has_a_curve_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[tuple[str, str, int, object]] = []

    def draw(project: str, folder: Path, config: object, labels: RunLabels) -> Sink:
        return Drawn(points, run_id(folder, "wandb"))

    monkeypatch.setattr(sinks, "WandbSink", draw)
    attempt(tmp_path, range(1, 1), None, 1.0)  # nothing was logged: the same run
    first = run_id(tmp_path, "wandb")
    attempt(tmp_path, range(1, 4), None, 1.0)
    assert {run for run, *_ in points} == {first}
    attempt(tmp_path, range(1, 3), None, 2.0)
    assert [value for run, name, _, value in points if run != first and name == "reward"] == [2.0, 2.0]


def test_two_trackers_of_a_folder_keep_their_own_steps(tmp_path: Path) -> None:
    first, second = LoggedSteps(tmp_path, "a"), LoggedSteps(tmp_path, "b")
    first.add(["loss"], 4)
    second.add(["loss"], 2)
    first.add(["reward"], 5)
    assert [LoggedSteps(tmp_path, tracker).last for tracker in ("a", "b", "c")] == [5, 2, -1]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"ID": {"reward": "x"}}', "[" * 10_000, "\0"])
def test_damaged_steps_do_not_stop_a_run(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "WandbSink", lambda *_: Drawn([], "a"))
    (tmp_path / LOGGED_STEPS).write_text(content.replace("ID", run_id(tmp_path, "wandb")))
    attempt(tmp_path, range(3, 5), 2, 1.0)
    assert json.loads((tmp_path / LOGGED_STEPS).read_text())[run_id(tmp_path, "wandb")]["reward"] == 4


@pytest.mark.parametrize("content", [b"", b"[]", b'{"wandb": 3}', b'{"wandb": "1', b"[" * 10_000, b'{"a\xff": "b"}'])
def test_damaged_ids_do_not_stop_a_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points: list[tuple[str, str, int, object]] = []
    monkeypatch.setattr(sinks, "WandbSink", lambda _project, folder, *_: Drawn(points, run_id(folder, "wandb")))
    attempt(tmp_path, range(1, 4), None, 1.0)
    (tmp_path / IDS).write_bytes(content)
    attempt(tmp_path, range(3, 5), 2, 2.0)
    assert len({run for run, *_ in points}) == 2 and points[-1][2] == 4
    assert (tmp_path / f"{IDS}.damaged").read_bytes() == content
    assert capsys.readouterr().err.count("Trackers get a new run") == 1
    assert {IDS, f"{IDS}.damaged"} <= set(RUN_FILES)


def test_comet_writes_offline_files_to_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    calls: list[tuple[str, Any]] = []
    module = stand_in("comet_ml", calls)
    module.__dict__.update(ExperimentConfig=lambda **options: options)
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    open_trackers(["comet_ml"], tmp_path, RunLabels(project="p", name="n", offline=True), {})
    (options,) = [options for what, options in calls if what == "start"]
    assert options["online"] is False and options["experiment_config"] == {"offline_directory": f"{tmp_path}/comet_ml"}
    assert "comet_ml" in RUN_FILES


def drawn_by_mlflow(folder: Path) -> list[tuple[int, float]]:
    """Return steps and values of the one run."""
    client = sys.modules["mlflow"].MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "p"]
    (run,) = client.search_runs([experiment.experiment_id])
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "rollout/reward")]


def drawn_by_trackio(folder: Path) -> list[tuple[int, float]]:
    """Return steps and values in Trackio's database."""
    import sqlite3

    (database,) = folder.glob("trackio/*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    return [(step, json.loads(metrics)["rollout/reward"]) for step, metrics in rows]


def drawn_by_comet(folder: Path) -> list[tuple[int, float]]:
    """Return steps and values in the archives that ``comet upload`` sends."""
    import zipfile

    points = []
    for archive in folder.glob("run/comet_ml/*.zip"):
        for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines():
            metric = json.loads(line)["payload"].get("metric") or {}
            if metric.get("metricName") == "rollout/reward":
                points.append((metric["step"], metric["metricValue"]))
    return points


READERS = {"mlflow": drawn_by_mlflow, "trackio": drawn_by_trackio, "comet_ml": drawn_by_comet}


def log_two_attempts(name: str, folder: str) -> None:
    """Log steps 1 to 4, then 3 to 5 of a run that resumes from step 2."""
    for resumed, steps in ((None, (1, 2, 3, 4)), (2, (3, 4, 5))):
        log = LogConfig.model_validate(LOG | {"trackers": [name], "name": "r", "offline": True})
        (sink,) = open_sinks(Path(folder), {}, log, resumed)
        for step in steps:
            sink.log({"rollout/reward": step / 4}, step)
        sink.finish()


@pytest.mark.parametrize("name", READERS)
def test_real_trackers_have_each_step_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name)
    (tmp_path / "run").mkdir()
    # Trackio reads its folder from the environment when it is first imported.
    child = multiprocessing.get_context("spawn").Process(target=log_two_attempts, args=(name, str(tmp_path / "run")))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert sorted(READERS[name](tmp_path)) == [(step, step / 4) for step in range(1, 6)]
