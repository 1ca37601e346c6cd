"""Renamed and removed keys and values of the configuration, and their replacements."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_dppo.config.section import TomlTable


class RenamedKey(NamedTuple):
    """A key that has another name now. Files and checkpoints with the old name stay readable."""

    new: str
    """Path of the key."""
    values: Mapping[str, str] = {}
    """New name of each renamed value."""


RENAMED_KEYS: Mapping[str, RenamedKey] = {
    "rollout.servers.answer_processes": RenamedKey("rollout.servers.client_processes"),
    "rollout.servers.patience_seconds": RenamedKey("rollout.servers.unavailable_timeout_seconds"),
    "loss.kl_anchor": RenamedKey("loss.kl_target"),
    "distillation.teacher_weights": RenamedKey("distillation.teacher_offload", {"whole": "model", "by_layer": "layer"}),
    "train.max_dropped_fraction": RenamedKey("train.max_nonfinite_fraction"),
    "eval.beside_training": RenamedKey("eval.overlap_training"),
}
"""Renamed keys by their old path. Both paths have the same section."""


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
    """Return a sentence with the replacement of a renamed or removed key, or None for any other key."""
    if path in RENAMED_KEYS:
        new = RENAMED_KEYS[path].new
        return f"this key is now {new}. Set only {new}"
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


def rename_keys(values: Mapping[str, Any]) -> TomlTable:
    """Return a configuration's tables with the current names of renamed keys.

    An old key beside its new name stays, so that it is reported as unknown.

    Args:
        values: Nested tables, which stay unchanged.
    """
    result = dict(values)
    for path in old_keys(values):
        *sections, key = path.split(".")
        table = result
        for section in sections:
            table[section] = dict(table[section])
            table = table[section]
        new = RENAMED_KEYS[path].new.rpartition(".")[2]
        if new not in table:
            table[new] = renamed_value(path, table.pop(key))
    return result


def renamed_value(path: str, value: object) -> object:
    """Return the current name of a renamed key's value; ``path`` is the key's old path."""
    return RENAMED_KEYS[path].values.get(value, value) if isinstance(value, str) else value


def old_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the old paths of the renamed keys in a configuration's tables."""
    return [path for path in RENAMED_KEYS if _has(values, path.split("."))]


def print_new_names(paths: Iterable[str], origin: str) -> None:
    """Print the current name of each renamed key, on rank 0.

    Args:
        paths: Old paths that were used.
        origin: Where they were used.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for path in paths:
        print(f"note     {origin}: {path} is now {RENAMED_KEYS[path].new}", file=sys.stderr, flush=True)


def _has(table: object, path: list[str]) -> bool:
    for part in path:
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def _drop(table: TomlTable, sections: list[str], key: str, default: object) -> None:
    """Remove ``key`` from a section if it has its default; copy the tables on the path to it."""
    for section in sections:
        if not isinstance(table.get(section), Mapping):
            return
        table[section] = dict(table[section])
        table = table[section]
    if key in table and table[key] == default:
        del table[key]
