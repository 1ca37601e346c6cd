"""Removed keys and values of the configuration, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_dppo.config.section import TomlTable


class RemovedKey(NamedTuple):
    """A key that was removed from its section."""

    default: object
    """Former default. This value is accepted and dropped, because ``config.toml`` of a recorded run has every key."""
    replacement: str
    """Replacement, as a sentence."""


REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "rollout.weight_sync.delta": RemovedKey(
        default=False, replacement="Remove it, and set method to 'distributed' or 'disk', which send all weights."
    ),
    "distillation.weight": RemovedKey(
        default=None, replacement="Remove it: 'reverse_kl' and 'forward_kl' have no weight."
    ),
}
"""Removed keys by their path."""

_ONE_KL = "Use 'reverse_kl' or 'forward_kl'."
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("distillation.divergence", "mixed_kl"): _ONE_KL,
    ("distillation.divergence", "jsd"): _ONE_KL,
    ("rollout.weight_sync.method", "tensor"): (
        "Use 'ipc' for servers on the trainer's machine, or 'disk' with rollout.weight_sync.folder in /dev/shm."
    ),
}
"""Replacement, as a sentence, for each ``(path of the key, removed value)``."""


def removed_key_hint(path: str) -> str | None:
    """Return a sentence with the replacement of a removed key, or None for any other key."""
    removed = REMOVED_KEYS.get(path)
    return None if removed is None else f"this key was removed. {removed.replacement}"


def removed_value_hint(path: str, value: object) -> str | None:
    """Return a sentence with the replacement of a removed value, or None for any other value."""
    replacement = REMOVED_VALUES.get((path, value)) if isinstance(value, str) else None
    return None if replacement is None else f"this value was removed. {replacement}"


def drop_removed_defaults(values: Mapping[str, Any]) -> TomlTable:
    """Return a configuration's tables without removed keys that have their former default.

    Args:
        values: Nested tables, which stay unchanged.
    """
    result = dict(values)
    for path, removed in REMOVED_KEYS.items():
        *sections, key = path.split(".")
        _drop(result, sections, key, removed.default)
    return result


def _drop(table: TomlTable, sections: list[str], key: str, default: object) -> None:
    """Remove ``key`` from a section if it has its default; copy the tables on the path to it."""
    for section in sections:
        if not isinstance(table.get(section), Mapping):
            return
        table[section] = dict(table[section])
        table = table[section]
    if key in table and table[key] == default:
        del table[key]
