"""Which values a data row may hold: those that everything after the reader can tokenize, send, write and read back.

Python's JSON reader takes more than JSON: halves of UTF-16 pairs, NaN, keys that stand twice. What it takes here is
kept exactly or refused with the location, never changed.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from megatron_dppo.errors import DataError
from megatron_dppo.types.stored_record import StoredRecord

_MAX_DEPTH = 64
"""Levels of nesting; rows are pickled to the reward workers, which recurses."""


def parse_object(location: str, line: bytes, *, non_finite: bool = False) -> StoredRecord:
    """Parse one line of a JSONL file. ``non_finite`` takes NaN and infinities, as Python writes them."""
    record = _parse(location, line, non_finite=non_finite)
    if not isinstance(record, dict):
        raise DataError(f"{location}: expected a JSON object, got {type(record).__name__}")
    return record


def parse_array(location: str, content: bytes) -> list[dict[str, Any]]:
    """Return the objects of a file that is one JSON array."""
    try:
        records = _parse(location, content)
    except DataError as error:
        raise DataError(
            f"{error}. The file begins with '[' and is read as one JSON array; JSONL has no brackets"
        ) from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{location}: entry {number} of the JSON array is {record!r:.80}, expected an object")
    return records


def _parse(location: str, content: bytes, *, non_finite: bool = False) -> Any:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    constants = float if non_finite else _refuse_constant
    try:
        return json.loads(text, parse_constant=constants, object_pairs_hook=_refuse_repeated)
    except json.JSONDecodeError as error:
        hint = ""
        if text.strip() in ("{", "[") or text.strip().endswith((",", "{", "[")):
            hint = ". A JSON object that extends over several lines is no row: write each row on one line"
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{location}: not valid JSON ({error.msg} at {where}){hint}") from error
    except RecursionError as error:
        raise DataError(f"{location}: nested more than {_MAX_DEPTH} levels deep; flatten the row") from error
    except ValueError as error:  # of the hooks, or a number with more digits than Python converts
        raise DataError(f"{location}: not usable JSON ({error}); correct the row") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; use null or a string")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object; keep one")
    return record


def check_values(location: str, record: Mapping[str, object]) -> None:
    """Refuse text that has no UTF-8 form and nesting without end, anywhere in a row."""
    for column, value in record.items():
        _check_text(location, column, column)
        waiting = [(value, 1)]
        while waiting:
            current, depth = waiting.pop()
            if depth > _MAX_DEPTH:
                raise DataError(
                    f"{location}: field {column!r} is nested more than {_MAX_DEPTH} levels deep; flatten the row"
                )
            if isinstance(current, str):
                _check_text(location, column, current)
            elif isinstance(current, Mapping):
                # Keys, too.
                waiting += [(part, depth + 1) for item in current.items() for part in item]
            elif isinstance(current, list | tuple):
                waiting += [(part, depth + 1) for part in current]


def _check_text(location: str, column: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location}: field {column!a} holds half of a UTF-16 pair, {text[error.start]!a} at character "
            f"{error.start}: no file can hold it. Write the whole character, or remove it"
        ) from error


def number_to_text(location: str, key: str, value: float) -> str:
    """Return a number as the text of a label."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{location}: field {key!r} must be a string or a finite number, got {value!r}")
    try:
        return str(value)
    except ValueError as error:
        raise DataError(
            f"{location}: field {key!r} is a number that cannot be written ({error}); use a string"
        ) from error
