"""Statements of docs/metrics.md about each metric, compared with what runs write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
OF_USERS = {"train/<name>", "rollout/<name>", "eval/<set>/<metric>"}
"""Rows for what users name: with them nothing would be missing."""
_PLACES = {"<k>": r"\d+", "<n>": r"\d+"}


@cache
def documented() -> frozenset[str]:
    """The names in the first column of its tables."""
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(encoding="utf-8"), re.M)
    return frozenset(name for row in rows for name in re.findall(r"`([^`]+)`", row)) - OF_USERS


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of a record of ``metrics.jsonl`` that no row of the page has."""
    patterns = [_pattern(name) for name in documented()]
    return {name for name in names if "/" in name and not any(p.fullmatch(name) for p in patterns)}


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(_PLACES.get(p, r"[\w.-]+") if p.startswith("<") else re.escape(p) for p in parts))
