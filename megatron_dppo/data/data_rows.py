"""Data rows in one form, from the layouts of slime, verl and the AIME sets.

The layout is recognised by the columns: the first of ``PROMPT_COLUMNS`` and the first of ``LABEL_COLUMNS`` that a row
has. All rows of a source must have the same layout, so that no row is read by another rule than its neighbours.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.data.json_values import number_to_text
from megatron_dppo.data.sources import is_columnar, read_records, require
from megatron_dppo.data.tasks import Split, load_task
from megatron_dppo.errors import DataError
from megatron_dppo.source_names import TASK
from megatron_dppo.types import PromptLimits
from megatron_dppo_conversations.messages import (
    TOOL_COLUMNS,
    Messages,
    media_problem,
    missing_prompt_hint,
    parse_messages,
    read_row_messages,
    read_row_tools,
)
from megatron_dppo_conversations.rules import ConversationError

PROBLEM_COLUMNS = ("problem", "question", "Problem", "Question")
"""Columns with a bare problem, to which a chat template is applied."""
PROMPT_COLUMNS = ("prompt", *PROBLEM_COLUMNS, "messages")
LABEL_COLUMNS = ("label", "reward_model.ground_truth", "answer", "Answer", "solution")
_ANSWER_COLUMNS = ("answer", "solution")
"""Columns whose text may wrap the answer (``_answer``)."""
_BOX = "\\boxed{"
_LAST_LINE = re.compile(r"\n####(?!#)[ \t]*")
"""Start of GSM8K's last line, which has the answer."""
_SUPERVISED_COLUMN = "messages"
"""Column of prompts, or of prompts with their answers in supervised data."""


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
    source: str = ""
    """Name of the row's source, as in ``[data.sources]``."""
    is_columnar: bool = False
    """The row's file gives every object the fields of all, with null for those that it has not."""
    limits: PromptLimits | None = None
    """Limits of the row's source. None: those of the run."""

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the row, which its chat template writes into the prompt; empty if there are none."""
        try:
            return read_row_tools(self.metadata, is_columnar=self.is_columnar)
        except ConversationError as error:
            raise DataError(
                f"{self.location}: {error}. Write tools as a list of {{type, function}}, or rename the column: "
                f"{' and '.join(TOOL_COLUMNS)} are given to the chat template"
            ) from error


@dataclass(frozen=True)
class RowLayout:
    """Columns of a row that are read, and the form of the prompt: ``text`` or ``messages``."""

    prompt_key: str
    label_key: str
    form: str

    def __str__(self) -> str:
        return f"{self.prompt_key} ({self.form}) + {self.label_key}"


def iter_rows(
    source: str,
    split: Split,
    prompt_key: str | None = None,
    label_key: str | None = None,
    name: str | None = None,
) -> Iterator[DataRow]:
    """Yield the rows of one source, each checked.

    A source is an embedded task (``task:NAME``), of which ``split`` is a part, the path of a JSONL or Parquet file, or
    ``hf:owner/name[/configuration][:split]``. A key ``a.b`` is a field inside a column; None detects the column, and an
    empty label key means that the data has no labels. Without ``name`` a source has its name among no others.
    """
    if source.startswith(TASK):
        yield from (DataRow(*row) for row in load_task(source).rows(split))
        return
    first: tuple[str, RowLayout] | None = None
    has_fillers = is_columnar(source)
    for location, record in read_records(source, name):
        if problem := media_problem(record):
            raise DataError(f"{location}: {problem}")
        layout = detect_layout(location, record, prompt_key, label_key)
        if first is None:
            first = (location, layout)
        elif layout != first[1]:
            raise DataError(
                f"{location}: this row looks like {layout}, the rows before it (from {first[0]}) like {first[1]}. All "
                "rows of a file must have one layout: convert the row or, if only the columns differ, name them with "
                "data.prompt_key and data.label_key"
            )
        yield _parse_row(location, record, layout, is_columnar=has_fillers)
    if first is None:
        raise DataError(f"{source} has no rows; expected rows with a prompt and a label (layouts: docs/data.md)")


def detect_layout(location: str, record: Mapping[str, Any], prompt_key: str | None, label_key: str | None) -> RowLayout:
    """Return the layout of a row."""
    is_detected = prompt_key is None
    prompt_key = prompt_key or _first(location, record, PROMPT_COLUMNS, "prompt")
    label_key = _first(location, record, LABEL_COLUMNS, "label") if label_key is None else label_key
    prompt = _read_prompt(location, record, prompt_key)
    if isinstance(prompt, str):
        return RowLayout(prompt_key, label_key, "text")
    if is_detected and prompt_key == _SUPERVISED_COLUMN and prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{location}: field {_SUPERVISED_COLUMN!r} ends with an assistant message, as the answers of supervised "
            "data do. Remove the answers, or set data.prompt_key = 'messages' if the policy is to continue them"
        )
    return RowLayout(prompt_key, label_key, "messages")


def _read_prompt(location: str, record: Mapping[str, Any], key: str, *, is_columnar: bool = False) -> str | Messages:
    """Return a prompt: text, or messages, which may be written as JSON text."""
    prompt = require(location, record, key)
    if isinstance(prompt, str) and prompt:
        try:
            parsed = parse_messages(prompt)
        except ValueError as error:
            raise DataError(f"{location}: field {key!r}: {error}") from error
        if parsed is None:
            return prompt
        prompt = parsed
    if isinstance(prompt, list) and prompt:
        if len(prompt) > 1 and all(isinstance(each, str) for each in prompt):
            raise DataError(
                f"{location}: field {key!r} is a column of {len(prompt)} texts, expected one prompt. Write each row of "
                "the table as an object of its own"
            )
        try:
            return read_row_messages(prompt, _known_tools(record, is_columnar), is_columnar=is_columnar)
        except ConversationError as error:
            raise DataError(f"{location}: field {key!r} holds no chat messages: {error}") from error
    raise DataError(
        f"{location}: field {key!r} must be a non-empty string or a list of messages {{role, content}}, got "
        f"{prompt!r:.200}"
    )


def _known_tools(record: Mapping[str, Any], is_columnar: bool) -> list[dict[str, Any]]:
    """Return the tools of a row; empty if they cannot be read, which counts where they are needed."""
    try:
        return read_row_tools(record, is_columnar=is_columnar)
    except ConversationError:
        return []


def _first(location: str, record: Mapping[str, Any], names: tuple[str, ...], meaning: str) -> str:
    for name in names:
        outer, _, inner = name.partition(".")
        value = record.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        # A Parquet row has every column of its file, empty ones as None. A worked solution is no answer.
        if value is not None and (name != "solution" or (isinstance(value, str) and _single_box(value) is not None)):
            return name
    filled = sorted(key for key, value in record.items() if value is not None)
    hint = missing_prompt_hint(record) if meaning == "prompt" else ""
    if meaning == "label" and "\\boxed" in str(record.get("solution")):
        hint = (
            f"the row has {filled}, and 'solution' is not one box from its start to its end. Write the answer into a "
            "column 'answer'"
        )
    if hint:
        raise DataError(f"{location}: field {meaning!r} is missing; {hint}")
    raise DataError(
        f"{location}: field {meaning!r} is missing; the row has {filled}. Known names are {', '.join(names)}; "
        f"any other column can be named with data.{meaning}_key"
    )


def _single_box(text: str) -> str | None:
    r"""Return the content of a text that is one ``\boxed{...}`` from its start to its end, or None."""
    stripped = text.strip()
    if not stripped.startswith(_BOX):
        return None
    depth = 0
    for index in range(len(_BOX) - 1, len(stripped)):
        depth += (stripped[index] == "{") - (stripped[index] == "}")
        if depth == 0:
            return stripped[len(_BOX) : index] if index == len(stripped) - 1 else None
    return None


def _answer(text: str) -> str:
    r"""Return the answer without its wrapping: in ``\boxed{..}`` (math-ai/aime24), or after ``####`` (GSM8K)."""
    boxed = _single_box(text)
    return _LAST_LINE.split(text)[-1] if boxed is None else boxed


def _parse_row(location: str, record: Mapping[str, Any], layout: RowLayout, *, is_columnar: bool) -> DataRow:
    label = require(location, record, layout.label_key) if layout.label_key else ""
    # The row's other columns are the function's metadata, nested ones as a table.
    outer_column = layout.label_key.partition(".")[0]
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f"{location}: field {layout.label_key!r} must be a string or a number, got {label!r:.80}. Fix: write it as "
            f"text, or set data.label_key = '' and let your reward function read metadata[{outer_column!r}]"
        )
    text = label if isinstance(label, str) else number_to_text(location, layout.label_key, label)
    used = (layout.prompt_key, layout.label_key)
    return DataRow(
        location,
        _read_prompt(location, record, layout.prompt_key, is_columnar=is_columnar),
        _answer(text) if layout.label_key in _ANSWER_COLUMNS else text,
        {key: value for key, value in record.items() if key not in used},
        is_problem=layout.prompt_key.rpartition(".")[2] in PROBLEM_COLUMNS,
        is_columnar=is_columnar,
    )


_Key = tuple[str, str]


def drop_duplicates(rows: Iterable[DataRow], mode: str) -> tuple[list[DataRow], int]:
    """Return the first row of each problem, in order, and the number of rows read.

    The mode is ``auto`` or ``prompt`` (same prompt), ``off``, or a column whose value names the problem. Only the
    returned rows stay in memory.
    """
    unique: list[DataRow] = []
    by_key: dict[_Key, DataRow] = {}
    count = 0
    for row in rows:
        count += 1
        key = _key(row, mode)
        earlier = None if key is None else by_key.setdefault(key, row)
        if earlier is None or earlier is row:
            unique.append(row)
        elif earlier.label != row.label:
            raise DataError(_contradiction(row, earlier, key))
    return unique, count


def _contradiction(row: DataRow, earlier: DataRow, key: _Key | None) -> str:
    assert key is not None
    what = "the same prompt" if key[0] == "prompt" else f"{key[0]} = {key[1]}"
    return (
        f"{row.location}: the label {row.label!r} contradicts {earlier.location}, a row of the same problem ({what}) "
        f"with the label {earlier.label!r}. Correct one of them, or say with data.deduplicate what makes two rows the "
        "same problem ('prompt', a column, or 'off')"
    )


def _key(row: DataRow, mode: str) -> _Key | None:
    """Return the key that identifies the problem of a row; None if no rows are duplicates."""
    if mode == "off":
        return None
    if mode not in ("auto", "prompt"):
        return (mode, _text(require(row.location, row.metadata, mode)))
    # An equal index with another prompt is another problem: files are joined, and each counts from 0.
    return ("prompt", row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
