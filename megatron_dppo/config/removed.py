"""Keys and values that were removed from the configuration, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RemovedKey(NamedTuple):
    """A key that no section has any more."""

    default: Any
    """Value that changed nothing. It is accepted and dropped: ``config.toml`` of a recorded run has every key."""
    instead: str
    """What to use now, as a sentence."""


REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "rollout.weight_sync.delta": RemovedKey(
        default=False, instead="Remove it, and set method to 'distributed' or 'disk', which send all weights."
    ),
    "distillation.weight": RemovedKey(default=None, instead="Remove it: 'reverse_kl' and 'forward_kl' have no weight."),
}
"""Removed keys by their path."""

_ONE_KL = "Use 'reverse_kl' or 'forward_kl'."
REMOVED_VALUES: Mapping[tuple[str, Any], str] = {
    ("distillation.divergence", "mixed_kl"): _ONE_KL,
    ("distillation.divergence", "jsd"): _ONE_KL,
}
"""``(path of the key, removed value)`` -> what to use now, as a sentence."""


def removed_key_hint(path: str) -> str | None:
    """Return that a key was removed and what to use now, or None for every other key."""
    removed = REMOVED_KEYS.get(path)
    return None if removed is None else f"this key was removed. {removed.instead}"


def removed_value_hint(path: str, value: Any) -> str | None:
    """Return that a value was removed and what to use now, or None for every other value."""
    instead = REMOVED_VALUES.get((path, value)) if isinstance(value, str) else None
    return None if instead is None else f"this value was removed. {instead}"


def drop_removed_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tables without removed keys that have their former default.

    Args:
        values: nested tables, which are not changed.
    """
    result = dict(values)
    for path, removed in REMOVED_KEYS.items():
        *sections, key = path.split(".")
        _drop(result, sections, key, removed.default)
    return result


def _drop(table: dict[str, Any], sections: list[str], key: str, default: Any) -> None:
    """Take ``key`` out of a section if it has its default; copies the tables on the way to it."""
    for section in sections:
        if not isinstance(table.get(section), Mapping):
            return
        table[section] = dict(table[section])
        table = table[section]
    if key in table and table[key] == default:
        del table[key]
