"""A run's logs never decide whether it resumes: any flipped byte costs at most the lines that it touches."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_dppo.errors import DataError
from megatron_dppo.report.records import DAMAGED, metric_problem, read_metrics, read_records, set_damaged_lines_aside
from megatron_dppo.run.evaluation import SAMPLES, sample_problem
from megatron_dppo.run.run_records import set_damaged_logs_aside

METRICS = [{"step": step, "rollout/reward": step / 8, "train/kl": None} for step in range(6)]
ANSWERS = [{"step": step, "prompt": "é?", "label": "1", "response": "two\n", "reward": 0.5} for step in range(6)]


def write(folder: Path) -> dict[str, bytes]:
    """Write both logs; return their bytes."""
    for name, records in (("metrics.jsonl", METRICS), (SAMPLES, ANSWERS)):
        (folder / name).write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", SAMPLES)}


def test_each_flipped_bit_costs_at_most_the_lines_that_it_touches(tmp_path: Path) -> None:
    chance = random.Random(3)
    checks = {"metrics.jsonl": metric_problem, SAMPLES: sample_problem}
    for name, content in write(tmp_path).items():
        for position in chance.sample(range(len(content)), 60):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            (tmp_path / name).write_bytes(flipped)
            notes = set_damaged_logs_aside(tmp_path)
            lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
            # A flipped line break joins two lines. The end of the file may look like a write that was interrupted.
            assert set(content.splitlines(keepends=True)) - set(lines) == set() or len(lines) >= 4
            assert len([line for line in lines if line in content]) >= 4
            assert len(read_records(tmp_path / name, checks[name])) == len(lines)
            if notes:
                assert name in notes[0] and "The run continues without" in notes[0]
                assert (tmp_path / (name + DAMAGED)).read_bytes()


def test_damaged_lines_are_kept_and_named(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()
    bad = [b'{"step": 7, "a": "text"}', b'{"step": -1}', b"\xff\xfe", b"[]", b'{"step": 1, "a": NaN}', b'{"stfp": 2}']
    for number, line in enumerate(bad):
        path.write_bytes(line + b"\n" + good)
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: "):
            read_metrics(path)
        assert read_metrics(path, skip_damaged=True) == METRICS
        note = set_damaged_lines_aside(path, metric_problem)
        assert "1 damaged lines (line 1: " in note and str(path) + DAMAGED in note
        assert path.read_bytes() == good
        assert (tmp_path / ("metrics.jsonl" + DAMAGED)).read_bytes().splitlines() == bad[: number + 1]
    assert set_damaged_lines_aside(path, metric_problem) == ""


def test_a_folder_in_place_of_a_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        read_metrics(tmp_path / "metrics.jsonl", skip_damaged=True)
