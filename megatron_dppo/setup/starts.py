"""The record of every start of a run (``starts.jsonl``), and the configuration in force (``config.toml``)."""

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dppo.config.io import dump_toml, load_config
from megatron_dppo.config.paths import absolute_path
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.files import read_regular_file, write_synced
from megatron_dppo.process.marker import MARKER
from megatron_dppo.setup.changes import Change, find_changes, find_content_changes
from megatron_dppo.setup.contents import Contents
from megatron_dppo.types.stored_record import StoredRecord

STARTS = "starts.jsonl"
CONFIG = "config.toml"
_PACKAGES = ("megatron-dppo", "megatron-core", "torch", "transformers", "transformer-engine", "triton")


def record_start(
    folder: Path,
    config: Config,
    *,
    world_size: int,
    layout: str,
    resumed_step: int | None,
    changes: Sequence[str],
    contents: Contents,
) -> str:
    """Add a line to ``starts.jsonl`` and write the configuration of this start to ``config.toml`` (rank 0).

    Return a message about an edited ``config.toml`` that was renamed; empty if there was none.
    """
    config = _with_absolute_folders(config)
    text = dump_toml(config)
    records = read_starts(folder)
    record = {
        "number": len(records) + 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "cwd": os.getcwd(),
        "versions": {"python": platform.python_version(), **_versions()},
        "world_size": world_size,
        "layout": layout,
        "resumed_step": resumed_step,
        "changes": list(changes),
        "config_sha256": _sha256(text),
        "config": config.model_dump(mode="json"),
        "contents": contents,
    }
    # The record is written before config.toml: a config.toml without a record counts as edited by the user.
    lines = "".join(json.dumps(each) + "\n" for each in (*records, record))
    write_synced(folder / STARTS, lines)
    note = _rename_edited_config(folder, records)
    write_synced(folder / CONFIG, text)
    return note


def _with_absolute_folders(config: Config) -> Config:
    """Return the configuration with absolute folders to write to, so that it means the same from everywhere."""
    run = config.run.model_copy(update={"output_dir": absolute_path(Path(config.run.output_dir))})
    rollout = config.rollout
    if rollout.weight_sync.folder is not None:
        folder = absolute_path(Path(rollout.weight_sync.folder))
        sync = rollout.weight_sync.model_copy(update={"folder": folder})
        rollout = rollout.model_copy(update={"weight_sync": sync})
    return config.model_copy(update={"run": run, "rollout": rollout})


def changes_since_last_start(folder: Path, config: Config, contents: Contents) -> list[Change]:
    """Return what differs from the last start of the run in a folder. Empty without one."""
    starts = read_starts(folder)
    if not starts:
        return []
    last = starts[-1]
    before = {key: files for key, files in last.get("contents", {}).items() if isinstance(files, dict)}
    folders = _with_absolute_folders(config)
    changes = find_changes(last.get("config", {}), folders, Path(last.get("cwd", "")), before, contents)
    changed = {change.key for change in changes}
    before = {key: files for key, files in before.items() if key not in changed}
    return changes + find_content_changes(before, contents, config, with_fixed=True)


def load_run_config(folder: Path, overrides: Sequence[str], *, with_functions: bool = False) -> Config:
    """Return the configuration of the run in a folder. Relative paths start at the folder where it was started last."""
    if not (folder / CONFIG).is_file() or not (folder / MARKER).is_file():
        raise ConfigError(f"{str(folder)!r} is not the folder of a run: {CONFIG} or {MARKER} is missing")
    starts = read_starts(folder)
    if not starts:
        raise ConfigError(f"{folder / STARTS} has no record of a start; {str(folder)!r} holds a part of a run only")
    cwd = Path(str(starts[-1].get("cwd", ".")))
    all_overrides = [*overrides, "--run.output_dir", str(folder)]
    return load_config(folder / CONFIG, all_overrides, relative_to=cwd, with_functions=with_functions)


def read_starts(folder: Path) -> list[StoredRecord]:
    """Return the records of all starts of a run, without damaged lines."""
    try:
        lines = read_regular_file(folder / STARTS).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{folder / STARTS} cannot be read: {error.strerror}. Move it away") from error
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [record for record in records if isinstance(record, dict) and _is_start(record)]


_TYPES: dict[str, tuple[type, ...]] = {
    "cwd": (str,),
    "world_size": (int,),
    "resumed_step": (int, type(None)),
    "config": (dict,),
    "config_sha256": (str,),
    "contents": (dict,),
}
"""Types of the values that are read. A record of another version may lack them."""
_MAX_NUMBER = 10**9


def _is_start(record: dict[str, Any]) -> bool:
    for name, types in _TYPES.items():
        value = record.get(name, types[0]())
        if type(value) not in types or (isinstance(value, int) and not 0 <= value <= _MAX_NUMBER):
            return False
    return "\0" not in record.get("cwd", "")


def _rename_edited_config(folder: Path, records: Sequence[dict[str, Any]]) -> str:
    """Rename a ``config.toml`` that no start of the run wrote, and return a message about it."""
    file = folder / CONFIG
    if not os.path.lexists(file) or _is_recorded(file, records):
        return ""
    backup = file.with_name(f"{CONFIG}.{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while os.path.lexists(backup):
        number += 1
        backup = file.with_name(f"{CONFIG}.{time.strftime('%Y%m%d-%H%M%S')}-{number}")
    file.rename(backup)
    return f"note     {file} was edited; it is renamed to {backup.name}, and {CONFIG} holds the configuration in force"


def _is_recorded(file: Path, records: Sequence[dict[str, Any]]) -> bool:
    try:
        digest = _sha256(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return any(record.get("config_sha256") == digest for record in records)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
