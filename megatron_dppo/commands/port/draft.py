"""Draft of a configuration translated from another framework, with the status of each of its settings."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ported", "changed", "unsupported", "unread"]
"""``changed``: ported with another meaning or default. ``unread``: its value is unknown without running the script."""


@dataclass(frozen=True)
class PortedSetting:
    """Status of one setting."""

    source_key: str
    """Key of the other framework. Empty for a key that only this package has."""
    value: str
    status: Status
    target: str = ""
    """Key and value of this package, or the reason why there is none."""


@dataclass
class Draft:
    """Settings of another framework and the configuration translated so far.

    Example:
        >>> draft = Draft({"data.max_response_length": "1024"})
        >>> draft.put("rollout.max_new_tokens", draft.read("data.max_response_length", int), "data.max_response_length")
        >>> draft.values, draft.rows[0].status
        ({'rollout': {'max_new_tokens': 1024}}, 'taken')
    """

    source: Mapping[str, Any]
    """Settings by key, as text, list or value in the file."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Settings with an unknown value, and the reason."""
    values: dict[str, Any] = field(default_factory=dict)
    """Translated configuration as nested tables."""
    rows: list[PortedSetting] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    num_processes: int | None = None
    withheld: set[str] = field(default_factory=set)
    """Target keys that depend on a setting with an unknown value. They get no default."""

    def read(self, key: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        """Return the converted value of a setting, or the default if it is missing or cannot be read."""
        if key not in self.source or key in self.unread:
            return default
        try:
            return convert(self.source[key])
        except (ValueError, TypeError, KeyError, SyntaxError):
            return default

    def put(self, path: str, value: Any, *source_keys: str, note: str = "") -> None:
        """Set a target key and record the settings that it comes from as ported, or as changed with a note."""
        *tables, key = path.split(".")
        table = self.values
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
        for name in source_keys:
            text = f"{path} = {value!r}" + (f" ({note})" if note else "")
            self.record(name, "changed" if note else "ported", text)
        if not source_keys:
            self.rows.append(PortedSetting("", "", "changed", f"{path} = {value!r} ({note})"))

    def record(self, source_key: str, status: Status, text: str) -> None:
        """Record the status of a setting. Later calls for the same setting have no effect."""
        if source_key in self.source and source_key not in self.handled:
            self.handled.add(source_key)
            value = self.source[source_key]
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            self.rows.append(PortedSetting(source_key, shown, status, text))

    def set_default(self, path: str, value: Any, stack: str) -> None:
        """Set a target key to the other framework's default, unless it is set already."""
        if path in self.withheld:
            return
        table: Any = self.values
        for name in path.split("."):
            if name not in table:
                self.put(path, value, note=f"{stack}'s default")
                return
            table = table[name]


Rule = Callable[[Draft, str], None]
"""Function that translates the setting of a key."""


def map_to(path: str, convert: Callable[[Any], Any], note: str = "") -> Rule:
    """Return a rule that maps a setting to the key ``path``."""

    def rule(draft: Draft, key: str) -> None:
        if key in draft.unread:
            draft.withheld.add(path)
            return
        try:
            value = convert(draft.source[key])
        except (ValueError, TypeError, KeyError, SyntaxError):
            draft.record(key, "unread", f"expected a value for {path}")
            return
        draft.put(path, value, key, note=note)

    return rule


def unsupported(reason: str) -> Rule:
    """Return a rule for a setting without a counterpart."""
    return lambda draft, key: draft.record(key, "unsupported", reason)


def apply_rules(draft: Draft, table: Mapping[str, Rule], patterns: Mapping[str, Rule]) -> None:
    """Translate the remaining settings: by exact key, else by the longest matching prefix, else as unsupported."""
    for key in draft.unread:
        draft.record(key, "unread", draft.unread[key])
        if key in table:
            table[key](draft, key)
    for key in draft.source:
        if key in draft.handled:
            continue
        prefix = max((name for name in patterns if key.startswith(name)), key=len, default=None)
        rule = table.get(key) or (patterns[prefix] if prefix is not None else unsupported("unknown setting"))
        rule(draft, key)


def flag(value: Any) -> bool:
    """Parse a boolean of hydra, YAML or argparse. A flag without a value is true."""
    if isinstance(value, bool):
        return value
    if value in ([], ""):
        return True
    return {"true": True, "false": False, "1": True, "0": False}[text(value).lower()]


def text(value: Any) -> str:
    """Return a string without hydra's inner quotes. A list must have one entry."""
    if isinstance(value, list):
        (value,) = value
    return str(value).strip().strip("'\"")


def number(value: Any) -> float:
    """Parse a float."""
    return float(text(value))


def integer(value: Any) -> int:
    """Parse an integer, also ``1e3``."""
    parsed = float(text(value))
    if not math.isfinite(parsed) or parsed != int(parsed):
        raise ValueError(value)
    return int(parsed)


def items(value: Any) -> list[str]:
    """Parse hydra's lists ``[a,b]`` and ``['a','b']``. A string is a list of one."""
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
    """Parse a string or a list, as for ``data.train``."""
    parsed = items(value)
    return parsed[0] if len(parsed) == 1 else parsed


def literal(value: Any) -> Any:
    """Parse a number, a boolean or text."""
    string = text(value)
    for convert in (integer, float):
        try:
            return convert(string)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(string.lower(), string)
