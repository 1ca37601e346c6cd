"""Values of dumps, and arguments of ``diagnose``, that cannot be: each is refused with its place, before any work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from megatron_dppo.commands.main import main
from megatron_dppo.errors import DataError, DiskError
from megatron_dppo_doctor.diagnose.dumps import DumpedSample, read_dump
from megatron_dppo_doctor.diagnose.ledger import Cause, CauseScoring, Ledger, make_ledger

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
VOCABULARY = 50
GOOD: dict[str, Any] = {"prompts": [5, 6], "responses": [7, 8], "rollout_log_probs": [-1.0, -2.0]}
SLIME: dict[str, Any] = {"tokens": [5, 6, 7, 8], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
SETS = {"rollout_top_p_token_ids": [7, 9, 8], "rollout_top_p_token_offsets": [0, 2, 3]}


def jsonl(folder: Path, *rows: Any) -> Path:
    file = folder / "dump.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(folder: Path, *rows: Any) -> list[DumpedSample]:
    return read_dump(jsonl(folder, *rows), None, VOCABULARY)


IDS = [[7.5, 8], [7.0, 8], [True, 8], ["a", "b"], [[7, 8]], [None, 8], [-7, 8], [VOCABULARY, 8], [HUGE, 8], [{}, 8]]
NO_LIST = [5, {"a": 1}, True, 1.5]
LOGPROBS = [[-1.0], [-1.0] * 3, [], [NAN, -1], [-1, INF], [-INF, -1], [None, -1], [1e300, -1], [-1e300, -1], [0.9, 0.4]]
LOGPROBS += [[-1, 0.002], ["a", "b"], ["-1", "-1"], [[-1, -2]], [True, -1], [-(HUGE**9), -1], [{}, -1]]
MASKS = [[1], [1, 1, 1], [2, 1], [-1, 1], [0.5, 1], [NAN, 1], [None, 1], ["1", "1"], [[1, 1]], "11", 1, {"1": 1}]
ROUTES = ["x", 5, [[[0]]], [[[0, 1]], [[0]], [[1]]], [[[0.5]]] * 3, [[[NAN]]] * 3, [[["a"]]] * 3, [[[HUGE]]] * 3]
ROUTES += [[[[True]]] * 3, [[[None]]] * 3, [[[2**64 - 1]]] * 3, {"a": 1}]
WRONG = [
    *((GOOD, name, value) for name in ("prompts", "responses") for value in (*IDS, *NO_LIST, [])),
    *((GOOD, name, v) for name in ("rollout_log_probs", "old_log_probs") for v in (*LOGPROBS, *NO_LIST, "ab")),
    *((GOOD, "response_mask", value) for value in MASKS),
    *((GOOD, "routed_experts", value) for value in ROUTES),
    *((SLIME, "tokens", value) for value in (*IDS, *NO_LIST, None, "ab", [])),
    *((SLIME, "response_length", value) for value in (1.7, 2.0, "x", "2", None, True, 0, -1, 4, [2], NAN, HUGE)),
    *((SLIME, "loss_mask", value) for value in MASKS),
    *((SLIME, "remove_sample", value) for value in ("false", 2, [], NAN, {})),
    *((SLIME | SETS, "rollout_top_p_token_ids", value) for value in (*IDS, *NO_LIST, [7, 9, 9], "789")),
    *(
        (SLIME | SETS, "rollout_top_p_token_offsets", v)
        for v in ([0], [1, 2, 3], [0, 2, 4], [0, 5, 3], [0, 2.0, 3], [0, 2], 3)
    ),
]


@pytest.mark.parametrize(("row", "column", "value"), WRONG)
def test_a_value_that_cannot_be_is_named_with_its_line_and_column(
    row: dict[str, Any], column: str, value: Any, tmp_path: Path
) -> None:
    file = jsonl(tmp_path, row, row | {column: value})
    with pytest.raises(DataError, match=r"expected|another tokenizer|lacks that token") as caught:
        read_dump(file, None, VOCABULARY)
    assert f"{file}, line 2: column '{column}'" in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_log_probs": [0.9, 0.4]}, "entry 1 of 2, is 0.9"),
        ({"old_log_probs": [-1.0]}, "has 1 entries for 2"),
        ({"old_log_probs": [-1.0, NAN]}, "2 of 2, is nan"),
        ({"responses": ["a", "b"]}, "entry 1 of 2, is 'a'"),
        ({"responses": [7, -100]}, "entry 2 of 2, is -100"),
        ({"responses": [7, VOCABULARY]}, "has token 50, but"),
    ],
)
def test_the_message_says_value_expectation_and_remedy(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read(tmp_path, GOOD | changes)


def test_what_stacks_really_write_is_read_as_before(tmp_path: Path) -> None:
    first, second = read(tmp_path, GOOD | {"response_mask": [True, 0.0], "rollout_log_probs": [9e-4, NAN]}, GOOD)
    assert first.sample.loss_mask.tolist() == [False, True, False] and first.trained is None
    assert first.sample.rollout_logprobs is not None and second.sample.rollout_logprobs is not None
    assert first.sample.rollout_logprobs.tolist() == pytest.approx([0, 9e-4, 0])
    assert second.sample.rollout_logprobs.tolist() == [0, -1, -2]
    outside = read(tmp_path, GOOD | {"response_mask": [0, 1], "old_log_probs": [None, -2], "rollout_log_probs": [5, 0]})
    assert outside[0].trained is not None and outside[0].trained.tolist() == [0, 0, -2]
    (with_sets,) = read(tmp_path, SLIME | SETS | {"rollout_routed_experts": [[[0, 1]]] * 4})
    assert with_sets.sample.sampling_mask is not None and with_sets.sample.sampling_mask.counts.tolist() == [2, 1]
    assert with_sets.routes is not None and with_sets.routes.shape == (3, 1, 2)
    arrays = {
        "tokens": torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        "response_length": torch.tensor(2),
        "rollout_log_probs": torch.tensor([-1.0, -2.0], dtype=torch.bfloat16),
        "loss_mask": np.array([1, 1], dtype=np.uint8),
        "rollout_routed_experts": torch.ones(3, 1, 2, dtype=torch.uint16),
        "remove_sample": False,
    }
    torch.save(
        {"samples": [arrays, arrays | {"tokens": [torch.tensor(token) for token in (5, 6, 7, 8)]}]}, tmp_path / "a.pt"
    )
    for dumped in read_dump(tmp_path / "a.pt", None, VOCABULARY):
        assert dumped.sample.labels.tolist() == [6, 7, 8] and dumped.sample.loss_mask.tolist() == [False, True, True]


def named(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def cut_parquet(folder: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist([GOOD] * 9), folder / "cut.parquet")
    (folder / "cut.parquet").write_bytes((folder / "cut.parquet").read_bytes()[:-20])
    return folder / "cut.parquet"


def bad_parquet(folder: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD | {"responses": [7, -1]}]), folder / "bad.parquet")
    return folder / "bad.parquet"


def bad_text(folder: Path) -> Path:
    texts = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    return folder / "text.parquet"


def torch_rows(*samples: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save({"samples": list(samples)}, folder / "dump.pt")
        return folder / "dump.pt"

    return write


def lines(content: bytes) -> Callable[[Path], Path]:
    return named("dump.jsonl", content)


RIGHT = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lines(RIGHT + b"\n\n5\n"), "line 3: expected a JSON object"),
        (lines(b"[1]\n"), "line 1: expected a JSON object"),
        (lines(b"null\n"), "line 1: expected a JSON object"),
        (lines(RIGHT + b'\n{"prompts": [1'), "line 2: not valid JSON"),
        (lines(RIGHT + b"\n\xff\xfe\x00"), "line 2: not UTF-8"),
        (lines(RIGHT.decode().encode("utf-16")), "line 1: not UTF-8"),
        (lines(b"[" * 100_000), "line 1: nested"),
        (lines(b'{"prompts": [' + b"9" * 5000 + b"]}"), "line 1: not usable JSON"),
        (lines(b'{"prompts": [1], "prompts": [2]}'), "stands twice"),
        (lines(b""), "is empty"),
        (lines(b"\n \n"), "has 0 responses"),
        (named("e.parquet", b""), "is empty"),
        (named("b.parquet", bytes(range(256)) * 8), "not readable as"),
        (cut_parquet, "not readable as"),
        (bad_text, "not readable as"),
        (bad_parquet, r"2 \(counted from 1\): column 'responses'"),
        (named("e.pt", b""), "is empty"),
        (named("b.pt", bytes(range(256)) * 8), "weights_only"),
        (torch_rows(SLIME, 5), r"2 \(counted from 1\): expected"),
        (torch_rows([1]), "row 1 .*got list"),
        (torch_rows({1: 2, "a": 3}), "row 1 .*no token"),
        (lambda folder: folder, "is a folder; give"),
        (lambda folder: folder / "none.jsonl", "no such file"),
        (lambda folder: folder / ("x" * 300 + ".jsonl"), "cannot be opened"),
        (named("dump.csv", b"1"), "has an unsupported"),
    ],
)
def test_a_file_that_is_no_dump_ends_in_one_clear_line(
    write: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_dump(write(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_rows_behind_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    file = jsonl(tmp_path, GOOD, 5)
    assert len(read_dump(file, 1)) == 1
    with pytest.raises(DataError):
        read_dump(file, 2)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *(("--temperature", value, "a finite number above 0") for value in ("nan", "inf", "-inf", "0", "-1")),
        *(("--top-p", value, "above 0 and at most 1") for value in ("1.5", "nan", "inf", "0", "-0.1")),
        *(("--min-p", value, "from 0 .*to below 1") for value in ("1", "1.5", "nan", "-0.1", "-inf")),
        *(("--top-k", value, "1 or more") for value in ("0", "-1")),
        *(("--limit", value, "1 or more") for value in ("0", "-3")),
    ],
)
def test_arguments_out_of_range_are_refused_before_any_file_is_read(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "--rollouts", "x", "--model", "y", f"{option}={value}"]) == 2
    message = capsys.readouterr().err
    assert option in message and value in message and re.search(words, message)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nodir/x.json", "a folder that does not exist"),
        ("dump.jsonl/x.json", "a folder that does not exist"),
        (".", "exists already"),
        ("", "exists already"),
        ("x" * 300, "cannot be created: File name too long"),
        ("dump.jsonl", "exists already"),
    ],
)
def test_a_json_file_that_cannot_be_written_is_told_before_the_work(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = jsonl(tmp_path, GOOD)
    before = file.read_bytes()
    assert main(["diagnose", "--rollouts", "dump.jsonl", "--model", "nowhere", "--json", target]) == 2
    assert words in (message := capsys.readouterr().err) and "--json" in message
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["dump.jsonl"]


def test_a_write_that_fails_after_all_is_no_exit_code_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = make_ledger(torch.zeros(2), [CauseScoring(Cause.UNEXPLAINED, torch.zeros(2))])
    target = tmp_path / "new" / "ledger.json"
    target.parent.mkdir()

    def made(*_: object) -> Ledger:
        target.parent.rmdir()
        return ledger

    monkeypatch.setattr("megatron_dppo_doctor.diagnose.foreign.diagnose_rollouts", made)
    assert main(["diagnose", "--rollouts", "x", "--model", "y", "--json", str(target)]) == DiskError.exit_code == 2
    printed = capsys.readouterr()
    assert "mismatch of 2 tokens" in printed.out and "the folder is gone" in printed.err


def test_a_ledger_is_never_made_of_numbers_that_are_none() -> None:
    with pytest.raises(ValueError, match="1 of the trainer's 2"):
        make_ledger(torch.tensor([-1.0, NAN]), [CauseScoring(Cause.UNEXPLAINED, torch.zeros(2))])
