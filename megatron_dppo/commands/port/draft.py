"""A configuration that is being made from another framework's, and what became of each of its settings."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["taken", "changed", "no home", "unread"]


@dataclass(frozen=True)
class PortedSetting:
    """What became of a setting."""

    theirs: str
    value: str
    status: Status
    ours: str = ""
    """our key and value, or why there is none"""


@dataclass
class Draft:
    """Their settings, ours so far, and a row for each of theirs.

    Example:
        >>> draft = Draft({"data.max_response_length": "1024"})
        >>> draft.put("rollout.max_new_tokens", draft.read("data.max_response_length", int), "data.max_response_length")
        >>> draft.values, draft.rows[0].status
        ({'rollout': {'max_new_tokens': 1024}}, 'taken')
    """

    source: Mapping[str, Any]
    """their key -> text, list or value as it stands in the file"""
    unread: Mapping[str, str] = field(default_factory=dict)
    """their key -> why its value is not known"""
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[PortedSetting] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    num_processes: int | None = None
    withheld: set[str] = field(default_factory=set)
    """our keys that a setting of theirs with an unknown value decides"""

    def read(self, key: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        """The value of their setting, or the default where it is not there or cannot be read."""
        if key not in self.source or key in self.unread:
            return default
        try:
            return convert(self.source[key])
        except (ValueError, TypeError, KeyError, SyntaxError):
            return default

    def put(self, path: str, value: Any, *theirs: str, note: str = "") -> None:
        """Set our key; the settings of theirs that it comes from are done."""
        *tables, key = path.split(".")
        table = self.values
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
        for name in theirs:
            text = f"{path} = {value!r}" + (f" ({note})" if note else "")
            self.say(name, "changed" if note else "taken", text)
        if not theirs:
            self.rows.append(PortedSetting("", "", "changed", f"{path} = {value!r} ({note})"))

    def say(self, theirs: str, status: Status, text: str) -> None:
        """What became of one of theirs; the first thing said stays."""
        if theirs in self.source and theirs not in self.done:
            self.done.add(theirs)
            value = self.source[theirs]
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            self.rows.append(PortedSetting(theirs, shown, status, text))

    def default(self, path: str, value: Any, whose: str) -> None:
        """Set our key to what is in force there, where nothing says anything of it."""
        if path in self.withheld:
            return
        table: Any = self.values
        for name in path.split("."):
            if name not in table:
                self.put(path, value, note=f"{whose}'s default")
                return
            table = table[name]


Rule = Callable[[Draft, str], None]
"""What becomes of a setting (its key) of theirs."""


def to(path: str, convert: Callable[[Any], Any], note: str = "") -> Rule:
    """It becomes our key."""

    def rule(draft: Draft, key: str) -> None:
        if key in draft.unread:
            draft.withheld.add(path)
            return
        try:
            value = convert(draft.source[key])
        except (ValueError, TypeError, KeyError, SyntaxError):
            draft.say(key, "unread", f"expected a value for {path}")
            return
        draft.put(path, value, key, note=note)

    return rule


def gone(why: str) -> Rule:
    """It has no home here."""
    return lambda draft, key: draft.say(key, "no home", why)


def apply(draft: Draft, table: Mapping[str, Rule], patterns: Mapping[str, Rule]) -> None:
    """What is left of theirs: by the table, by the beginning of the key, or without a home."""
    for key in draft.unread:
        draft.say(key, "unread", draft.unread[key])
        if key in table:
            table[key](draft, key)
    for key in draft.source:
        if key in draft.done:
            continue
        start = max((name for name in patterns if key.startswith(name)), key=len, default=None)
        rule = table.get(key) or (patterns[start] if start is not None else gone("not known here"))
        rule(draft, key)


def flag(value: Any) -> bool:
    """True or False of hydra's, YAML's and argparse's spellings; a flag alone is true."""
    if isinstance(value, bool):
        return value
    if value in ([], ""):
        return True
    return {"true": True, "false": False, "1": True, "0": False}[text(value).lower()]


def text(value: Any) -> str:
    """A string without the quotes that hydra has inside the shell's; of several values the only one."""
    if isinstance(value, list):
        (value,) = value
    return str(value).strip().strip("'\"")


def number(value: Any) -> float:
    """A float, from text too."""
    return float(text(value))


def whole(value: Any) -> int:
    """An integer, from ``1e3`` too."""
    found = float(text(value))
    if not math.isfinite(found) or found != int(found):
        raise ValueError(value)
    return int(found)


def items(value: Any) -> list[str]:
    """The strings of a list, as hydra writes it: ``[a,b]``, ``['a','b']``; one string is a list of one."""
    if isinstance(value, list):
        return [text(part) for part in value]
    inside = str(value).strip()
    if not inside.startswith("["):
        return [text(inside)]
    try:
        return [str(part) for part in ast.literal_eval(inside)]
    except (ValueError, SyntaxError):
        return [text(part) for part in inside.strip("[]").split(",") if part.strip()]


def one_or_list(value: Any) -> str | list[str]:
    """As ``data.train`` has it."""
    found = items(value)
    return found[0] if len(found) == 1 else found


def literal(value: Any) -> Any:
    """A number, a boolean or text, whatever it reads as."""
    found = text(value)
    for convert in (whole, float):
        try:
            return convert(found)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(found.lower(), found)
