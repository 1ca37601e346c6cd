"""Which columns are read of which layout, and what happens when a file mixes layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.prompts import load_rows
from megatron_dppo.errors import DataError
from tests.unit.data_files import LAYOUTS, SUMS, user, write_jsonl, write_parquet

OWN_COLUMNS = {"prompt", "problem", "question", "Problem", "label"}


def message_of(path: str, **keys: Any) -> str:
    with pytest.raises(DataError) as error:
        load_rows(path, "train", **keys)
    return str(error.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_problems_from_jsonl_and_from_parquet(tmp_path: Path, name: str) -> None:
    jsonl = load_rows(write_jsonl(tmp_path / "rows.jsonl", LAYOUTS[name]), "train").rows
    parquet = load_rows(write_parquet(tmp_path / "rows.parquet", LAYOUTS[name]), "train").rows
    chat = name in ("slime messages", "verl")
    for rows, file in ((jsonl, "rows.jsonl"), (parquet, "rows.parquet")):
        assert [r.prompt for r in rows] == [user(q) if chat else q for q, _ in SUMS]
        assert [r.label for r in rows] == [a for _, a in SUMS]
        assert [r.location for r in rows] == [f"{file}:{i}" for i in range(1, 5)]
    assert [r.metadata for r in jsonl] == [r.metadata for r in parquet]
    assert set(jsonl[0].metadata) == set(LAYOUTS[name][0]) - OWN_COLUMNS - (
        set()
        if name in ("slime text", "verl")
        else {"answer", "Answer"} | ({"solution"} if "aime24" in name else set())
    )
    assert all(r.is_problem == (not chat and name != "slime text") for r in jsonl + parquet)


def test_a_reward_function_finds_the_columns_of_its_framework(tmp_path: Path) -> None:
    verl = load_rows(write_jsonl(tmp_path / "v.jsonl", LAYOUTS["verl"]), "train").rows[0].metadata
    assert verl["data_source"] == "math_dapo" and verl["extra_info"]["index"] == "id-1+1="
    assert verl["reward_model"]["style"] == "rule"
    slime = load_rows(write_jsonl(tmp_path / "s.jsonl", LAYOUTS["slime text"]), "train").rows[0].metadata
    assert slime == {"metadata": {"level": 1}}


def test_configured_columns_take_precedence_over_detected_ones(tmp_path: Path) -> None:
    row = {
        "prompt": "no",
        "label": "no",
        "inner": {"deep": {"question": "1+1="}},
        "reward_model": {"ground_truth": "2"},
        "a.b": "3",
    }
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    (result,) = load_rows(path, "train", prompt_key="inner.deep.question", label_key="reward_model.ground_truth").rows
    assert (result.prompt, result.label, result.is_problem) == ("1+1=", "2", True)
    assert result.metadata == row  # a field inside a column leaves the column whole
    (result,) = load_rows(path, "train", label_key="a.b").rows
    assert (result.prompt, result.label) == ("no", "3")
    message = message_of(path, label_key="inner.deep.answer")
    assert "rows.jsonl:1: field 'inner.deep.answer' is missing; 'inner.deep' has ['question']" in message
    message = message_of(path, label_key="prompt.text")
    assert "field 'prompt.text' is missing; 'prompt' has 'no'" in message


@pytest.mark.parametrize(
    ("write", "odd", "looks"),
    [
        (write_jsonl, "slime text", "prompt (text) + label"),
        (write_jsonl, "verl", "prompt (messages) + reward_model.ground_truth"),
        (write_parquet, "verl", "prompt (messages) + reward_model.ground_truth"),
        (write_jsonl, "aime25 of math-ai", "problem (text) + answer"),
        (write_parquet, "aime25 of math-ai", "problem (text) + answer"),
    ],
)
def test_the_error_of_a_file_with_mixed_layouts_has_the_first_odd_row(
    tmp_path: Path, write: Any, odd: str, looks: str
) -> None:
    usual = LAYOUTS["slime messages"]
    message = message_of(write(tmp_path / "rows.file", [*usual[:2], LAYOUTS[odd][2], LAYOUTS[odd][3]]))
    assert f"rows.file:3: this row looks like {looks}, the rows before it (from rows.file:1) like " in message
    assert "prompt (messages) + label" in message and "data.prompt_key" in message


def test_two_files_may_have_two_layouts(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"][:2])
    second = write_parquet(tmp_path / "b.parquet", LAYOUTS["verl"][2:])
    rows = load_rows([first, second], "train").rows
    assert [r.location for r in rows] == ["a.jsonl:1", "a.jsonl:2", "b.parquet:1", "b.parquet:2"]


def test_a_worked_solution_is_never_used_as_the_answer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "1+1=", "solution": "Add. \\boxed{2}"}])
    assert "field 'label' is missing; the row has ['problem', 'solution']" in message_of(path)
    for solution in ("\\boxed{1} and \\boxed{2}", "\\boxed{1}, \\boxed{2}", "\\boxed{1", "\\boxed{1}}"):
        path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "x", "solution": solution}])
        assert "'solution' is not one box from its start to its end" in message_of(path)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "x", "solution": " \\boxed{\\frac{1}{2}} "}])
    assert load_rows(path, "train").rows[0].label == "\\frac{1}{2}"


def test_the_error_of_a_row_without_known_columns_lists_all_names(tmp_path: Path) -> None:
    message = message_of(write_jsonl(tmp_path / "rows.jsonl", [{"text": "1+1=", "value": "2"}]))
    assert "rows.jsonl:1: field 'prompt' is missing; the row has ['text', 'value']" in message
    assert "prompt, problem, question" in message and "data.prompt_key" in message
