"""Repeated rows are dropped, counted, and never allowed to contradict each other."""

from __future__ import annotations

import pytest

from megatron_dppo.data.data_rows import DataRow, drop_duplicates
from megatron_dppo.errors import DataError


def verl(location: str, text: str, label: str, index: object, source: str = "dapo") -> DataRow:
    return DataRow(
        location, [{"role": "user", "content": text}], label, {"data_source": source, "extra_info": {"index": index}}
    )


def places(rows: list[DataRow], mode: str) -> list[str]:
    kept, count = drop_duplicates(iter(rows), mode)
    assert count == len(rows)
    return [row.location for row in kept]


def test_the_first_of_a_hundred_repeated_problems_remains() -> None:
    rows = [verl(f"f:{100 * i + j}", f"{j}+1=", str(j + 1), f"uuid-{j}") for i in range(100) for j in range(7)]
    assert places(rows, "auto") == [f"f:{j}" for j in range(7)]
    assert places(rows, "extra_info.index") == [f"f:{j}" for j in range(7)]
    assert len(places(rows, "off")) == 700


def test_an_equal_index_and_label_with_another_prompt_is_another_problem() -> None:
    rows = [
        verl("f:1", "1+1=", "2", 0),
        verl("f:2", "1+1=", "2", 1),
        verl("f:3", "0+2=", "2", 1),
        verl("f:4", "3", "3", 1),
    ]
    for mode in ("auto", "prompt"):
        assert places(rows, mode) == ["f:1", "f:3", "f:4"]
    assert places(rows[:3], "extra_info.index") == ["f:1", "f:2"]


def test_an_index_counts_inside_one_file_and_one_data_source() -> None:
    rows = [
        verl("f:1", "1+1=", "2", 0),
        verl("f:2", "2+2=", "4", 0, "gsm8k"),
        verl("g:1", "3+3=", "6", 0),
        verl("g:2", "4+4=", "8", None),
        verl("g:3", "5+5=", "10", None),
    ]
    assert len(places(rows, "auto")) == 5


def test_text_and_messages_differ_and_a_column_can_identify_prompts() -> None:
    rows = [DataRow("f:1", "1+1=", "2", {"uid": 7}), verl("f:2", "1+1=", "2", 0)]
    assert len(places(rows, "auto")) == 2
    rows = [DataRow("f:1", "a", "2", {"uid": [1, 2]}), DataRow("f:2", "b", "2", {"uid": [1, 2]})]
    assert places(rows, "uid") == ["f:1"]
    with pytest.raises(DataError, match="f:1: field 'id'"):
        drop_duplicates(rows, "id")


@pytest.mark.parametrize(
    ("mode", "what"),
    [("auto", "the same prompt"), ("prompt", "the same prompt"), ("extra_info.index", "extra_info.index = 3")],
)
def test_contradicting_labels_name_both_rows(mode: str, what: str) -> None:
    rows = [verl("f:1", "0", "0", 2), verl("f:5", "1+1=", "2", 3), verl("f:9", "1+1=", "3", 3)]
    with pytest.raises(DataError) as error:
        drop_duplicates(rows, mode)
    text = str(error.value)
    assert "f:9: the label '3' contradicts f:5" in text and what in text and "data.deduplicate" in text
    assert len(places(rows, "off")) == 3
