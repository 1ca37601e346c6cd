from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.commands.main import main
from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.report import sinks
from megatron_dppo.report.metrics import MetricsWriter, reduce_metrics
from megatron_dppo.report.records import read_metrics
from megatron_dppo.types import Metric


def writer(folder: Path, resumed_step: int | None = None, **changes: Any) -> MetricsWriter:
    log = LogConfig.model_validate({"tensorboard": False} | changes)
    return MetricsWriter(folder, {}, log, resumed_step=resumed_step)


def write_steps(folder: Path, *steps: int, resumed_step: int | None = None) -> Path:
    sink = writer(folder, resumed_step)
    for step in steps:
        sink.write(step, {"rollout/reward": step / 8})
    sink.close()
    return sink.path


def test_means_are_weighted_by_their_denominators_and_not_averaged_twice() -> None:
    parts = [{"a": Metric(6.0, 3.0)}, {"a": Metric(1.0, 1.0)}, {"a": Metric(0.0, 4.0)}]
    assert reduce_metrics(parts, None) == {"a": 7 / 8}


def test_a_maximum_ignores_denominators_and_may_be_negative() -> None:
    parts = [{"m": Metric(-3.0, 0.0, "max")}, {"m": Metric(-2.0, 5.0, "max")}, {"m": Metric(-7.0, kind="max")}]
    assert reduce_metrics(parts, None) == {"m": -2.0}
    assert reduce_metrics(parts[:1], None) == {"m": -3.0}


def test_a_nan_maximum_stays_visible_at_any_position() -> None:
    for values in ((math.nan, 1.0), (1.0, math.nan), (2.0, math.nan, 1.0)):
        assert math.isnan(reduce_metrics([{"m": Metric(v, kind="max")} for v in values], None)["m"])
    infinite = [{"m": Metric(v, kind="max")} for v in (math.inf, -math.inf)]
    assert reduce_metrics(infinite, None) == {"m": math.inf}


def test_a_mean_over_nothing_is_missing_and_a_micro_batch_without_tokens_changes_nothing() -> None:
    assert reduce_metrics([{"a": Metric(0.0, 0.0), "m": Metric(1.0, 0.0, "max")}], None) == {"m": 1.0}
    assert reduce_metrics([{"a": Metric(3.0, 2.0)}, {"a": Metric(0.0, 0.0)}], None) == {"a": 1.5}


def test_micro_batches_may_have_different_names_or_none() -> None:
    parts = [{"a": Metric(1.0)}, {}, {"b": Metric(4.0, 2.0)}, {"a": Metric(3.0)}]
    assert reduce_metrics(parts, None) == {"a": 2.0, "b": 2.0}
    assert reduce_metrics([], None) == {}


def test_sums_are_kept_in_double_precision_and_carry_no_gradient() -> None:
    big = torch.tensor(2.0**24 + 1, dtype=torch.float64, requires_grad=True)  # no float32
    parts = [{"a": Metric(big, torch.tensor(1))}, {"a": Metric(torch.tensor([1.0], dtype=torch.bfloat16), 0.0)}]
    assert reduce_metrics(parts, None) == {"a": 2.0**24 + 2}


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0), (torch.tensor(math.nan), 1.0)])
def test_a_nan_maximum_stays_visible_in_any_order(values: tuple[Any, Any]) -> None:
    parts = [{"m": Metric(value, kind="max")} for value in values]
    assert math.isnan(reduce_metrics(parts, None)["m"])


def test_a_rank_that_holds_copies_contributes_nothing() -> None:
    assert reduce_metrics([{"a": Metric(1.0)}], None, contributes=False) == {}


def test_each_step_is_one_line_that_is_readable_at_once(tmp_path: Path) -> None:
    sink = writer(tmp_path / "new" / "run")
    sink.write(0, {"eval/accuracy": 0.25})
    sink.write(1, {"rollout/reward": 0.5, "perf/tokens": 7.0})
    expected = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "rollout/reward": 0.5, "perf/tokens": 7.0}]
    assert read_metrics(sink.path) == expected  # before close: a crash loses nothing
    assert [json.loads(line) for line in sink.path.read_text().splitlines()] == expected
    sink.close()


def test_non_finite_values_are_written_as_null(tmp_path: Path) -> None:
    sink = writer(tmp_path)
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(sink.path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}


def test_a_resumed_run_drops_the_records_after_its_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1, 2, 3, 4)
    path = write_steps(tmp_path, 3, 4, 5, resumed_step=2)
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    path = write_steps(tmp_path, resumed_step=5)
    assert [r["rollout/reward"] for r in read_metrics(path)] == [step / 8 for step in range(6)]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1, 2)
    assert [r["step"] for r in read_metrics(write_steps(tmp_path, 0))] == [0]


def test_an_incomplete_last_line_is_ignored_and_replaced_on_resume(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0, 1, 2)
    whole = path.read_text()
    path.write_text(whole[:-12])
    assert [r["step"] for r in read_metrics(path)] == [0, 1]
    write_steps(tmp_path, 2, resumed_step=1)
    assert path.read_text() == whole
    assert read_metrics(tmp_path / "nowhere.jsonl") == []


def test_tensorboard_receives_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = writer(tmp_path, tensorboard=True)
    for step in (1, 2):
        sink.write(step, {"rollout/reward": step / 8})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 0.125), (2, 0.25)]


def test_a_resume_purges_later_steps_from_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resumed_step in (((1, 2, 3), None), ((2, 3), 1)):
        sink = writer(tmp_path, resumed_step=resumed_step, tensorboard=True)
        for step in steps:
            sink.write(step, {"rollout/reward": step + (10.0 if resumed_step else 0.0)})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 1.0), (2, 12.0), (3, 13.0)]


def test_weights_and_biases_receives_values_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: None)
    package = SimpleNamespace(init=lambda **options: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setattr(sinks, "require_wandb", lambda project: package)
    sink = writer(tmp_path, wandb_project="mine")
    assert sink.has_tables
    sink.write(1, {"rollout/reward": 0.5})
    sink.write_table(1, "masked", ["token", "n"], [["a", 3]])
    sink.close()
    assert logged == [({"rollout/reward": 0.5}, 1), ({"masked": (["token", "n"], [["a", 3]])}, 1)]


def test_weights_and_biases_without_its_package_is_rejected_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without_wandb(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(ConfigError, match=r"log\.wandb_project = 'mine' .*pip install 'megatron-dppo\[wandb\]'"):
        writer(tmp_path, wandb_project="mine")


def test_metrics_of_older_runs_are_read_by_their_current_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {
        "rollout/breaches": "rollout/invalid_responses",
        "rollout/lost_servers": "rollout/evicted_servers",
        "rollout/kept_ids": "rollout/allowed_ids",
        "rollout/left_out/no_signal": "rollout/dropped_groups/no_signal",
        "rollout/left_out/surplus": "rollout/dropped_groups/surplus",
        "rollout/left_out/given_up": "rollout/dropped_groups/canceled",
        "train/anchor_abs_prob_diff": "train/recomputed_abs_prob_diff",
    }
    values = {name: float(i) for i, name in enumerate(old)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1} | {old[name]: values[name] for name in old}]
    for name, new in old.items():
        assert main(["help", name]) == 0
        assert new in capsys.readouterr().out


def test_a_deleted_file_is_written_again_and_a_replaced_one_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for damage in ("unlink", "rename"):
        folder = tmp_path / damage
        sink = writer(folder)
        sink.write(1, {"rollout/reward": 0.25})
        sink.path.rename(folder / "elsewhere") if damage == "rename" else sink.path.unlink()
        sink.write(2, {"rollout/reward": 0.5})
        sink.write(3, {"rollout/reward": 0.75})
        assert [(r["step"], r["rollout/reward"]) for r in read_metrics(sink.path)] == [(1, 0.25), (2, 0.5), (3, 0.75)]
        assert capsys.readouterr().err.count("it is written again with its 1 records") == 1
        (folder / "other").write_text("of another program")
        (folder / "other").replace(sink.path)
        with pytest.raises(ConfigError, match="replaced by another"):
            sink.write(4, {"rollout/reward": 1.0})
        assert sink.path.read_text() == "of another program"
        sink.close()
