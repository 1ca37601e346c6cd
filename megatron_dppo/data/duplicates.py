"""Repeated rows: the published DAPO-Math-17k file holds each problem about a hundred times, verl's AIME file 32 times.

Two rows with different answers for one problem are an error: either answer would be trained on in turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_dppo.data.rows import Row
from megatron_dppo.data.sources import require
from megatron_dppo.errors import DataError

_Key = tuple[Any, ...]
"""What the key is, where it counts if not everywhere, and its value."""


def drop_duplicates(rows: Iterable[Row], mode: str) -> tuple[list[Row], int]:
    """The first row of each problem, in order, and how many rows there were.

    Args:
        rows: one after the other; only the kept ones stay in memory.
        mode: ``auto`` (same prompt, or same ``extra_info.index`` and ``data_source`` in one file), ``prompt``,
            ``off``, or a column whose value names the problem (``a.b`` for a field inside a column).

    Raises:
        DataError: two rows of one problem with different labels, or a row without the column.
    """
    kept: list[Row] = []
    seen: dict[_Key, Row] = {}
    count = 0
    for row in rows:
        count += 1
        keys = _keys(row, mode)
        for key in keys:
            if key in seen and seen[key].label != row.label:
                raise DataError(_contradiction(row, seen[key], key))
        known = [seen[key] for key in keys if key in seen]
        if not known:
            kept.append(row)
        for key in keys:
            seen.setdefault(key, known[0] if known else row)
    return kept, count


def _contradiction(row: Row, earlier: Row, key: _Key) -> str:
    what = "the same prompt" if key[0] == "prompt" else f"{key[0]} = {key[-1]}"
    return (
        f"{row.place}: the label {row.label!r} contradicts {earlier.place}, a row of the same problem ({what}) "
        f"with the label {earlier.label!r}. Correct one of them, or say with data.deduplicate what makes two rows the "
        "same problem ('prompt', a column, or 'off')"
    )


def _keys(row: Row, mode: str) -> list[_Key]:
    """What identifies the problem; rows that share one of these are duplicates."""
    if mode == "off":
        return []
    if mode not in ("auto", "prompt"):
        return [(mode, _text(require(row.place, row.metadata, mode)))]
    prompt = (row.prompt,) if isinstance(row.prompt, str) else tuple((m["role"], m["content"]) for m in row.prompt)
    keys: list[_Key] = [("prompt", prompt)]
    extra = row.metadata.get("extra_info")
    if mode == "auto" and isinstance(extra, Mapping) and extra.get("index") is not None:
        # Two files may both count from 0, and so may two data sources in one file.
        scope = (row.place.rpartition(":")[0], _text(row.metadata.get("data_source")), _text(extra.get("split")))
        keys.append(("extra_info.index", scope, _text(extra["index"])))
    return keys


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
