"""The JSONL files of a run, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dppo.errors import DataError


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file; none where there is no file. A last line that a crash cut off is left out.

    Raises:
        DataError: there is no file but something else, or a line is not a JSON object.
    """
    return [record for _, record in _numbered(path)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, see ``read_records``.

    Raises:
        DataError: also a record without a step, or with something else than numbers and null.
    """
    found = []
    for number, record in _numbered(path):
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise _damaged(path, number, f"step = {step!r}, expected a whole number from 0")
        for name, value in record.items():
            if value is not None and not (isinstance(value, int | float) and abs(value) < float("inf")):
                raise _damaged(path, number, f"{name} = {value!r}, expected a finite number or null")
        found.append(record)
    return found


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines from 1."""
    if not path.exists():
        return
    if not path.is_file():
        raise DataError(f"{path} is no file, but a run writes one of that name; move it away")
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _record(path, number, line)
    with suppress(DataError):  # every whole line ends with a line break
        if last.strip():
            yield len(lines) + 1, _record(path, len(lines) + 1, last)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, f"not JSON: {str(error)[:100]}") from error
    if not isinstance(record, dict):
        raise _damaged(path, number, f"{type(record).__name__}, expected a JSON object")
    return record


def _damaged(path: Path, number: int, problem: str) -> DataError:
    return DataError(
        f"{path}, line {number}: {problem}. A run writes no such line; mend it or take it out, or move the file away"
    )
