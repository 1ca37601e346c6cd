"""Advice of a full disk, of a folder in use or lost, and of the guard, followed from the state that prints it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_dppo import files as disk
from megatron_dppo.config.run import LogConfig
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import CheckpointError, ConfigError, DiskError, TrainingStopped
from megatron_dppo.files import require_new, require_space, write_new
from megatron_dppo.process.lock import LOCK, FolderLock
from megatron_dppo.process.stop_signal import StopSignal
from megatron_dppo.process.time_limit import TimeLimit
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.records import read_metrics
from megatron_dppo.run import loop
from megatron_dppo.run.collector import RolloutCollector
from megatron_dppo.run.guard import FirstUpdateGuard, GuardHistory
from megatron_dppo.run.offline import write_lines
from megatron_dppo.setup.changes import check_changes, find_changes
from megatron_dppo_agents import tasks
from megatron_dppo_engines.servers.pool import PoolCounts
from tests.unit.configs import config
from tests.unit.run.test_disk import small_disk, write_answers, write_checkpoint, write_metrics, write_model
from tests.unit.run.test_guard import FP32

ROOT = Path(__file__).parents[3]
SAME_COMMAND = "start the same command again"


def make_room(folder: Path) -> None:
    (folder / "filler").unlink(missing_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)


@pytest.mark.parametrize("kind", [write_answers, write_model, write_checkpoint])
def test_the_same_command_writes_after_room_was_made(
    kind: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with small_disk(tmp_path / "disk") as make_full:
        write, _ = kind(tmp_path / "disk")
        make_full()
        with pytest.raises(DiskError, match=SAME_COMMAND):
            write()
    # The disk below has room.
    write()


def test_a_resumed_run_continues_the_metrics_of_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder) as make_full:
        write, _ = write_metrics(folder)
        make_full()
        with pytest.raises(DiskError, match=SAME_COMMAND):
            write()
        make_room(folder)
        sink = MetricsWriter(folder, {}, LogConfig(tensorboard=False), resumed_step=1)
        sink.write(2, {"a": 2.0})
        assert [record["step"] for record in read_metrics(sink.path)] == [1, 2]


def write_result(file: Path) -> None:
    """As ``eval``, ``replay``, ``diagnose`` and ``port`` do."""
    require_new(file, "--json")
    write_new(file, "x" * 4_000_000)


def write_tasks(file: Path) -> None:
    environment = MagicMock()
    environment.return_value.tasks.return_value = [{"task": "x" * 4_000_000}]
    settings = config(agent={"environment": "verifiers:A", "environment_python": sys.executable})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dppo.config.io.load_config", lambda *_: settings)
        patch.setattr("megatron_dppo_agents.environment.EnvironmentAgent", environment)
        tasks.run(MagicMock(config="c.toml", file=file), [])


def write_responses(file: Path) -> None:
    require_new(file, "--output")
    write_lines(file, ["x" * 10] * 3 + ["x" * 4_000_000])


@pytest.mark.parametrize("write", [write_result, write_tasks, write_responses])
def test_the_same_command_makes_the_file_that_a_full_disk_cut(write: Callable[[Path], None], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as make_full:
        file = tmp_path / "disk/new.json"
        make_full()
        with pytest.raises(DiskError, match=SAME_COMMAND) as error:
            write(file)
        if "move this file away" in str(error.value):
            shutil.move(file, tmp_path / "cut.json")
        assert not file.exists()
    write(file)
    assert file.stat().st_size >= 4_000_000


def test_room_or_another_folder_is_enough_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {tmp_path / "a": 10, tmp_path / "b": 1000}
    monkeypatch.setattr(disk, "free_bytes", lambda path: free[path])
    with pytest.raises(DiskError, match="choose another folder"):
        require_space(tmp_path / "a", 100, "the run")
    require_space(tmp_path / "b", 100, "the run")
    free[tmp_path / "a"] = 1000
    require_space(tmp_path / "a", 100, "the run")


HOLDER = """
import sys, time
from pathlib import Path
from megatron_dppo.process.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), heartbeat_seconds=0.1)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start processes that hold folders."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


StartRun = Callable[[Path], "subprocess.Popen[str]"]


def test_a_folder_in_use_is_free_when_the_run_is_stopped_or_its_lock_file_deleted(
    tmp_path: Path, start_run: StartRun
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for advice in ("Choose another folder", "stop that run", "delete "):
        owner = start_run(run)
        with pytest.raises(ConfigError) as error:
            FolderLock(run)
        assert advice in str(error.value)
        if advice == "Choose another folder":
            (tmp_path / "other").mkdir()
            FolderLock(tmp_path / "other").release()
        elif advice == "delete ":
            file = re.search(r"delete (\S+)$", str(error.value))
            assert file is not None
            Path(file[1]).unlink()
            lock = FolderLock(run)
            # The advice was for a run that has exited. This one has not, and writes nothing more.
            assert owner.wait(60) == 2 and lock.describe_loss() == ""
            lock.release()
        owner.terminate()
        owner.wait(60)
        FolderLock(run).release()


def rename(run: Path, start_run: StartRun) -> Callable[[], object]:
    run.rename(run.parent / "away")
    return lambda: (run.parent / "away").rename(run)


def delete(run: Path, start_run: StartRun) -> Callable[[], object]:
    shutil.copytree(run, run.parent / "copy")
    shutil.rmtree(run)
    return lambda: (run.parent / "copy").rename(run)


def delete_the_lock(run: Path, start_run: StartRun) -> Callable[[], object]:
    (run / LOCK).unlink()
    return lambda: None


def take_over(run: Path, start_run: StartRun) -> Callable[[], object]:
    (run / LOCK).unlink()
    other = start_run(run)

    def make_sure_that_nothing_else_writes() -> None:
        with pytest.raises(ConfigError, match="in use by"):
            FolderLock(run)
        other.terminate()
        other.wait(60)

    return make_sure_that_nothing_else_writes


@pytest.mark.parametrize("lose", [rename, delete, delete_the_lock, take_over])
def test_a_run_that_lost_its_folder_resumes_by_its_own_words(
    lose: Callable[[Path, StartRun], Callable[[], object]], tmp_path: Path, start_run: StartRun
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint").write_text("step 3")
    owner = start_run(run)
    bring_back = lose(run, start_run)
    assert owner.wait(60) == 2
    assert owner.stderr is not None
    text = owner.stderr.read()
    assert "bring the folder back with its checkpoints, make sure that nothing else writes to it, and run the" in text
    bring_back()
    lock = FolderLock(run)
    assert (run / "checkpoint").read_text() == "step 3"
    lock.release()


Sections = dict[str, dict[str, Any]]
SERVERS = {"dtype": "fp32", "engine": "sglang", "servers": {"urls": ["http://a"]}}
RARELY_PROBED: Sections = {**FP32, "rollout": {**SERVERS, "weight_sync": {"probe_every": 10}}}
NOISY: Sections = {"train": {"layer_noise": {"std": 0.2}}}
GUARD: list[tuple[str, Sections, float, float, str, Sections, str]] = [
    # name, configuration, mean |pi - mu|, dropped, advice, its change, the flag that it names
    ("limit", FP32, 0.01, 0.0, "raise train.max_first_prob_diff", {"train": {"max_first_prob_diff": 0.02}}, ""),
    ("noise", NOISY, 0.1, 0.0, "raise train.max_first_prob_diff", {"train": {"max_first_prob_diff": 0.2}}, ""),
    (
        "no noise",
        NOISY,
        0.1,
        0.0,
        "or lower it (and resume with --allow-changed train.layer_noise.std)",
        {"train": {"layer_noise": {"std": 0.0}}},
        "train.layer_noise.std",
    ),
    (
        "overflow",
        {},
        0.0,
        0.05,
        "try rollout.dtype = 'fp32', or bf16 instead of fp16, and resume with --allow-changed rollout.dtype",
        {"rollout": {"dtype": "fp32"}},
        "rollout.dtype",
    ),
    ("dropped", {}, 0.0, 0.05, "train.max_nonfinite_fraction", {"train": {"max_nonfinite_fraction": 0.1}}, ""),
    (
        "probe",
        RARELY_PROBED,
        0.01,
        0.0,
        "rollout.weight_sync.probe_every = 1",
        {"rollout": {"weight_sync": {"probe_every": 1}}},
        "",
    ),
]


@pytest.mark.parametrize(
    ("sections", "difference", "dropped", "advice", "change", "flag"),
    [row[1:] for row in GUARD],
    ids=[row[0] for row in GUARD],
)
def test_the_guards_advice_resumes_the_run(
    sections: Sections, difference: float, dropped: float, advice: str, change: Sections, flag: str
) -> None:
    before = config(**sections)
    with pytest.raises(TrainingStopped) as stop:
        check_step(before, difference, dropped)
    assert advice in str(stop.value)
    after = config(**{name: sections.get(name, {}) | change.get(name, {}) for name in {*sections, *change}})
    changes = find_changes(before.model_dump(mode="json"), after)
    assert changes
    if flag:
        with pytest.raises(CheckpointError, match=f"--allow-changed {flag}"):
            check_changes(changes, Path("step_1"), accepted=[])
        assert f"--allow-changed {flag}" in str(stop.value)
    check_changes(changes, Path("step_1"), accepted=[flag])
    # A limit that was raised lets the step pass. The other changes give other rollouts.
    if "train" in change and not flag:
        check_step(after, difference, dropped)


def check_step(settings: Any, difference: float, dropped: float) -> None:
    guard = FirstUpdateGuard.from_config(
        settings.train,
        settings.rollout,
        settings.model,
        nonfinite_fraction=dropped,
        is_on_policy=True,
        history=GuardHistory(),
    )
    guard({"abs_prob_diff": difference})


class TroubledEngine(ServerEngine):
    """An engine over servers, some of whose answers broke the contract."""

    def __init__(self) -> None:
        self.messages = [f"http://b{i}: expected 3 log-probabilities, got 2" for i in range(20)]

    def take_counts(self) -> PoolCounts:
        messages, self.messages = self.messages, []
        return PoolCounts(messages=messages)

    def take_ranks(self) -> dict[str, Any]:
        return {}


def test_a_stop_by_the_guard_prints_the_broken_contracts_of_the_step_and_saves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = MagicMock(config=config())
    session.collector.engine = TroubledEngine()
    session.collector.take_counts.side_effect = lambda: RolloutCollector.take_counts(session.collector)
    session.state.step = 3
    session.state.evaluation_due = False
    session.state.has_reached.return_value = False
    stop = MagicMock(spec=StopSignal)
    stop.requested.return_value = False

    session.updater.step.side_effect = TrainingStopped("the rollouts of this step do not fit the policy")
    with pytest.raises(TrainingStopped, match="fit the policy"):
        loop.train_steps(session, stop, MagicMock(spec=TimeLimit))
    printed = capsys.readouterr().err
    assert all(f"servers  http://b{i}: expected 3 log-probabilities, got 2" in printed for i in range(20))
    assert session.state.step == 3, "the step is not counted"
    session.records.log_step.assert_not_called()
    session.checkpoints.save.assert_not_called()
    session.collector.publish.assert_not_called()
