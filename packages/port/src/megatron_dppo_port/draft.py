"""Draft of a configuration translated from another framework, with the status of each of its settings.

A setting is known, unread (its value is not determined by the file) or absent. Only known values are translated. A key
of this package that depends on an unread value is left to the user, never set to a default.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from megatron_dppo.config.describe import keys
from megatron_dppo_port.converters import is_null, literal, text

Status = Literal["ported", "default", "changed", "unsupported", "unread"]
"""``default``: not in the file, the framework's own default. ``changed``: ported with another meaning or unit.
``unread``: the file does not determine the value."""
FILL_IN = "TO FILL IN"
"""Start of the value of a key that the user must set. No key accepts it, so such a file cannot be trained."""
OPTIONAL_KEYS = (
    *("log.", "eval.", "data.eval", "checkpoint.", "run.output_dir", "run.seed"),
    *("rollout.sglang.", "rollout.vllm.", "rollout.servers.count"),
)
"""Keys that do not change what is trained. Their unread values are listed, and the key is left out."""


@dataclass(frozen=True)
class Setting:
    """Setting of another framework."""

    value: Any
    """Text, list or value in the file. None for ``null``."""
    unread: str | None = None
    """Reason why the value is unknown. None if it is known."""


@dataclass(frozen=True)
class PortedSetting:
    """Status of one setting."""

    source_key: str
    """Key of the other framework. Empty for a key that only this package has."""
    value: str
    status: Status
    target: str = ""
    """Key and value of this package, or the reason why there is none."""


class UnreadSettingError(Exception):
    """A setting whose value is needed and unknown, or has no counterpart."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


@dataclass
class Draft:
    """Settings of another framework and the configuration translated so far.

    Example:
        >>> draft = Draft({"data.max_response_length": Setting("1024")}, {}, "verl 0.9.1")
        >>> with draft.target("rollout.max_new_tokens"):
        ...     tokens = draft.read("data.max_response_length", integer)
        ...     draft.put("rollout.max_new_tokens", tokens, "data.max_response_length")
        >>> draft.values, draft.rows[0].status
        ({'rollout': {'max_new_tokens': 1024}}, 'ported')
    """

    source: Mapping[str, Setting]
    """Settings of the file by key."""
    defaults: Mapping[str, Any]
    """Defaults of the framework's version by key, for settings that the file does not have."""
    version: str
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[PortedSetting] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    consulted: set[str] = field(default_factory=set)
    """Settings that a value depends on."""
    to_fill_in: dict[str, str] = field(default_factory=dict)
    """Keys of this package that the user must set, and the reason."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Settings that a key left to the user depends on, and the text of their row if they have no other effect."""
    withheld: set[str] = field(default_factory=set)
    """Keys of this package that depend on an unread value. They get no default."""
    num_processes: int | None = None
    """Processes of the original run. None if the file does not say."""
    last_read: str = ""

    def read(self, key: str, convert: Callable[[Any], Any]) -> Any:
        """Return the converted value of a setting, or the framework's default. None if it has neither.

        Raises ``UnreadSettingError`` for a value that is unknown or not of the expected form.
        """
        self.consulted.add(key)
        self.last_read = key
        setting = self.source.get(key)
        if setting is None:
            value = self.defaults.get(key)
            return None if value is None else convert(value)
        if setting.unread is not None:
            raise UnreadSettingError(key, setting.unread)
        if setting.value is None or is_null(setting.value):
            return None
        try:
            return convert(setting.value)
        except (ValueError, TypeError, KeyError, SyntaxError, OverflowError) as error:
            raise UnreadSettingError(key, f"{_shown(setting.value)!r} is not a value of {key}") from error

    def has(self, key: str) -> bool:
        """Return True if the file has a setting, read or unread."""
        return key in self.source

    @contextmanager
    def target(self, *paths: str) -> Iterator[None]:
        """Leave these keys of this package to the user if a value inside the block is unread."""
        before = set(self.consulted)
        try:
            yield
        except (UnreadSettingError, ArithmeticError) as raised:
            error = raised
            if not isinstance(error, UnreadSettingError):
                error = UnreadSettingError(self.last_read, "a size of 0, or too large")
            optional = ", ".join(path for path in paths if path.startswith(OPTIONAL_KEYS))
            self.record(error.key, "unread", error.reason + (f"; {optional} keeps its default" if optional else ""))
            for path in paths:
                self.leave_to_user(path, error.key, error.reason)
            waiting = {key: f"{paths[0]} also depends on {error.key}" for key in self.consulted - before}
            self.waiting = waiting | self.waiting

    def leave_to_user(self, path: str, key: str, reason: str) -> None:
        """Mark a key of this package as one that the user must set, unless it has a value."""
        if self.get(path) is not None:
            return
        self.withheld.add(path)
        if not path.startswith(OPTIONAL_KEYS):
            self.to_fill_in[path] = f"{key}: {reason}"
            self._insert(path, f"{FILL_IN}: {key}: {reason}")

    def get(self, path: str) -> Any:
        """Return the translated value of a key of this package. None if it has none."""
        table: Any = self.values
        for name in path.split("."):
            if not isinstance(table, dict) or name not in table:
                return None
            table = table[name]
        return table

    def _insert(self, path: str, value: Any) -> None:
        *tables, key = path.split(".")
        table = self.values
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value

    def put(self, path: str, value: Any, *source_keys: str, note: str = "") -> None:
        """Set a key of this package and record the settings that it comes from. None sets nothing."""
        if value is None:
            return
        if path in self.to_fill_in:
            for name in source_keys:
                self.record(name, "unread", f"{path} also depends on {self.to_fill_in[path]}")
            return
        # A default of the framework that equals ours is left out of the file. The loss is always written in full.
        is_default = not any(name in self.source for name in source_keys) and not note and not path.startswith("loss.")
        if not is_default or value != _package_default(path):
            self._insert(path, value)
        text = f"{path} = {value!r}" + (f" ({note})" if note else "")
        for name in source_keys:
            if name in self.source:
                self.record(name, "changed" if note else "ported", text)
            elif name not in self.handled:
                self.handled.add(name)
                self.rows.append(PortedSetting(name, _shown(self.defaults.get(name)), "default", text))
        if not source_keys:
            self.rows.append(PortedSetting("", "", "changed", text))

    def record(self, source_key: str, status: Status, text: str) -> None:
        """Record the status of a setting of the file. Later calls for the same setting have no effect."""
        if source_key in self.source and source_key not in self.handled:
            self.handled.add(source_key)
            self.rows.append(PortedSetting(source_key, _shown(self.source[source_key].value), status, text))

    def translate(self, key: str, path: str, convert: Callable[[Any], Any], note: str = "") -> None:
        """Set a key of this package to the converted value of one setting. None sets nothing."""
        with self.target(path):
            self.put(path, self.read(key, convert), key, note=note)


@cache
def _package_default(path: str) -> Any:
    fields = keys()
    return fields[path].default if path in fields else None


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


Rule = Callable[[Draft, str], None]
"""Function that translates the setting of a key."""


def map_to(path: str, convert: Callable[[Any], Any], note: str = "") -> Rule:
    """Return a rule that maps a setting to the key ``path``."""

    def rule(draft: Draft, key: str) -> None:
        with draft.target(path):
            value = draft.read(key, convert)
            if value is None:
                draft.record(key, "ported", f"null: {path} keeps its default")
            elif key in draft.source or (draft.get(path) is None and path not in draft.withheld):
                draft.put(path, value, key, note=note)

    return rule


def map_within(table: str, name: Callable[[str], str]) -> Rule:
    """Return a rule that maps a setting to the key ``name`` of a table, which has the setting's own type."""
    return lambda draft, key: map_to(table + name(key), literal)(draft, key)


def unsupported(reason: str) -> Rule:
    """Return a rule for a setting without a counterpart."""

    def rule(draft: Draft, key: str) -> None:
        if key in draft.source:
            unread = draft.source[key].unread
            draft.record(key, "unread" if unread else "unsupported", unread or reason)

    return rule


@dataclass(frozen=True)
class NoCounterpart:
    """Setting that changes the training and cannot be translated."""

    path: str
    """Key of this package that the user must set instead."""
    reason: str
    harmless: tuple[str, ...] = ("false", "0", "0.0")
    """Values in lower case that change nothing."""


def leave_without_counterpart(draft: Draft, table: Mapping[str, NoCounterpart]) -> None:
    """Leave the keys to the user that depend on settings without a counterpart."""
    for key, entry in table.items():
        if not draft.has(key):
            continue
        with draft.target(entry.path):
            value = draft.read(key, lambda words: "true" if words == [] else text(words))
            if value is not None and value.lower() not in entry.harmless:
                raise UnreadSettingError(key, f"{value}: {entry.reason}")
            no_effect(draft, key)


def no_effect(draft: Draft, key: str) -> None:
    """Record a setting that others make ineffective."""
    draft.record(key, "ported", "changes nothing beside the other settings")


def apply_rules(draft: Draft, table: Mapping[str, Rule], patterns: Mapping[str, Rule]) -> None:
    """Translate the remaining settings: by exact key, else by the longest matching prefix, else as unsupported."""
    for key, setting in draft.source.items():
        # An unread setting may be handled for one key of this package and leave another one to the user.
        if key in draft.handled and not (setting.unread and key in table):
            continue
        prefix = max((name for name in patterns if key.startswith(name)), key=len, default=None)
        rule = table.get(key) or (patterns[prefix] if prefix is not None else None)
        if rule is not None:
            rule(draft, key)
        elif key in draft.waiting:
            draft.record(key, "unread", draft.waiting[key])
        elif key in draft.consulted and setting.unread is None:
            no_effect(draft, key)
        draft.record(key, "unread" if setting.unread else "unsupported", setting.unread or "unknown setting")
    # After the settings of the file, so that a default never hides one of them.
    for key in draft.defaults:
        if key in table and key not in draft.source and key not in draft.handled:
            table[key](draft, key)
