"""Data rows in one form, from the layouts of slime, verl and the AIME sets.

The layout is recognised by the columns: the first of ``PROMPT_COLUMNS`` and the first of ``LABEL_COLUMNS`` that a row
has. All rows of a source must have the same layout, so that no row is read by another rule than its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.data import reasoning_gym
from megatron_dppo.data.json_values import number_to_text
from megatron_dppo.data.sources import read_records, require
from megatron_dppo.data.tasks import PREFIX, TASKS, Split
from megatron_dppo.errors import DataError

PROBLEM_COLUMNS = ("problem", "question", "Problem", "Question")


PROMPT_COLUMNS = ("prompt", *PROBLEM_COLUMNS)


LABEL_COLUMNS = ("label", "reward_model.ground_truth", "answer", "Answer", "solution")


_ANSWER_COLUMNS = ("answer", "solution")


_BOX, _LAST_LINE = "\\boxed{", "\n#### "


Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class DataRow:
    """One data row."""

    location: str
    """Source and line, for example ``train.jsonl:12``."""
    prompt: str | Messages
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns."""
    is_problem: bool = False
    """The prompt is a bare problem (a column ``problem`` or ``question``), not text made for a model."""


@dataclass(frozen=True)
class RowLayout:
    """Columns of a row that are read, and the form of the prompt: ``text`` or ``messages``."""

    prompt_key: str
    label_key: str
    form: str

    def __str__(self) -> str:
        return f"{self.prompt_key} ({self.form}) + {self.label_key}"


def iter_rows(
    source: str, split: Split, prompt_key: str | None = None, label_key: str | None = None
) -> Iterator[DataRow]:
    """Yield the rows of one source, each checked.

    Args:
        source: an embedded task (``tasks.TASKS``), ``task:reasoning_gym:NAME``, the path of a JSONL or Parquet file, or
            ``hf:owner/name[/configuration][:split]``.
        split: which part of a task; other sources are taken whole.
        prompt_key: column of the prompt, ``a.b`` for a field inside a column; None = recognised.
        label_key: column of the reference answer, likewise; empty = there is none, and each label is empty.

    Raises:
        DataError: a source without rows, a bad row, or the first row of another layout; named by line and field.
    """
    if source in TASKS:
        for i, (prompt, label) in enumerate(TASKS[source].rows(split)):
            yield DataRow(f"{source.removeprefix(PREFIX)}/{split}:{i}", prompt, label)
        return
    if source.startswith(reasoning_gym.PREFIX):
        yield from (DataRow(*problem) for problem in reasoning_gym.problems(source, split))
        return
    first: tuple[str, RowLayout] | None = None
    for location, record in read_records(source):
        layout = detect_layout(location, record, prompt_key, label_key)
        if first is None:
            first = (location, layout)
        elif layout != first[1]:
            raise DataError(
                f"{location}: this row looks like {layout}, the rows before it (from {first[0]}) like {first[1]}. All "
                "rows of a file must have one layout: convert the row or, if only the columns differ, name them with "
                "data.prompt_key and data.label_key"
            )
        yield _parse_row(location, record, layout)
    if first is None:
        raise DataError(f"{source} has no rows; expected rows with a prompt and a label (layouts: docs/data.md)")


def detect_layout(location: str, record: Mapping[str, Any], prompt_key: str | None, label_key: str | None) -> RowLayout:
    """Return the layout of a row.

    Raises:
        DataError: a column is missing, or holds something else than a prompt.
    """
    prompt_key = prompt_key or _first(location, record, PROMPT_COLUMNS, "prompt")
    label_key = _first(location, record, LABEL_COLUMNS, "label") if label_key is None else label_key
    prompt = require(location, record, prompt_key)
    if isinstance(prompt, str) and prompt:
        return RowLayout(prompt_key, label_key, "text")
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return RowLayout(prompt_key, label_key, "messages")
    raise DataError(
        f"{location}: field {prompt_key!r} must be a non-empty string or a list of messages {{role, content}}, got "
        f"{prompt!r}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and isinstance(value.get("role"), str)


def _first(location: str, record: Mapping[str, Any], names: tuple[str, ...], meaning: str) -> str:
    for name in names:
        outer, _, inner = name.partition(".")
        value = record.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        # A Parquet row has every column of its file, empty ones as None. A worked solution is no answer.
        if value is not None and (name != "solution" or _is_box(value)):
            return name
    filled = sorted(key for key, value in record.items() if value is not None)
    raise DataError(
        f"{location}: field {meaning!r} is missing; the row has {filled}. Known names are {', '.join(names)}; "
        f"any other column can be named with data.{meaning}_key"
    )


def _is_box(value: Any) -> bool:
    return isinstance(value, str) and value.strip().startswith(_BOX) and value.strip().endswith("}")


def _answer(text: str) -> str:
    r"""Return the answer without its wrapping: in ``\boxed{..}`` (math-ai/aime24), or after ``####`` (GSM8K)."""
    if _is_box(text):
        return text.strip().removeprefix(_BOX).removesuffix("}")
    return text.rpartition(_LAST_LINE)[2]


def _parse_row(location: str, record: Mapping[str, Any], layout: RowLayout) -> DataRow:
    label = require(location, record, layout.label_key) if layout.label_key else ""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(f"{location}: field {layout.label_key!r} must be a string or a number, got {label!r}")
    text = label if isinstance(label, str) else number_to_text(location, layout.label_key, label)
    used = (layout.prompt_key, layout.label_key)
    return DataRow(
        location,
        require(location, record, layout.prompt_key),
        _answer(text) if layout.label_key in _ANSWER_COLUMNS else text,
        {key: value for key, value in record.items() if key not in used},
        is_problem=layout.prompt_key.rpartition(".")[2] in PROBLEM_COLUMNS,
    )


_Key = tuple[Any, ...]
"""Name of the key, its scope if it is not global, and its value."""


def drop_duplicates(rows: Iterable[DataRow], mode: str) -> tuple[list[DataRow], int]:
    """Return the first row of each problem, in order, and the number of rows read.

    Args:
        rows: one after the other; only the returned ones stay in memory.
        mode: ``auto`` (same prompt, or same ``extra_info.index`` and ``data_source`` in one file), ``prompt``,
            ``off``, or a column whose value names the problem (``a.b`` for a field inside a column).

    Raises:
        DataError: two rows of one problem with different labels, or a row without the column.
    """
    unique: list[DataRow] = []
    by_key: dict[_Key, DataRow] = {}
    count = 0
    for row in rows:
        count += 1
        keys = _keys(row, mode)
        for key in keys:
            if key in by_key and by_key[key].label != row.label:
                raise DataError(_contradiction(row, by_key[key], key))
        duplicated = [by_key[key] for key in keys if key in by_key]
        if not duplicated:
            unique.append(row)
        # All keys of a duplicate lead to the first row, also those that the first row does not have.
        for key in keys:
            by_key.setdefault(key, duplicated[0] if duplicated else row)
    return unique, count


def _contradiction(row: DataRow, earlier: DataRow, key: _Key) -> str:
    what = "the same prompt" if key[0] == "prompt" else f"{key[0]} = {key[-1]}"
    return (
        f"{row.location}: the label {row.label!r} contradicts {earlier.location}, a row of the same problem ({what}) "
        f"with the label {earlier.label!r}. Correct one of them, or say with data.deduplicate what makes two rows the "
        "same problem ('prompt', a column, or 'off')"
    )


def _keys(row: DataRow, mode: str) -> list[_Key]:
    """Return the keys that identify the problem of a row. Rows that share one of them are duplicates."""
    if mode == "off":
        return []
    if mode not in ("auto", "prompt"):
        return [(mode, _text(require(row.location, row.metadata, mode)))]
    prompt = (row.prompt,) if isinstance(row.prompt, str) else tuple((m["role"], m["content"]) for m in row.prompt)
    keys: list[_Key] = [("prompt", prompt)]
    extra = row.metadata.get("extra_info")
    if mode == "auto" and isinstance(extra, Mapping) and extra.get("index") is not None:
        # Two files may both count from 0, and so may two data sources in one file.
        scope = (row.location.rpartition(":")[0], _text(row.metadata.get("data_source")), _text(extra.get("split")))
        keys.append(("extra_info.index", scope, _text(extra["index"])))
    return keys


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
