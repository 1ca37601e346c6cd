"""The record of every start of a run (``starts.jsonl``), and the configuration in force (``config.toml``)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dppo.config.io import dump_toml, load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import write_synced
from megatron_dppo.run.run_folder import MARKER

STARTS = "starts.jsonl"
CONFIG = "config.toml"
_PACKAGES = ("megatron-dppo", "megatron-core", "torch", "transformers", "transformer-engine", "triton")


def record_start(
    folder: Path, config: Config, *, world_size: int, layout: str, resumed_step: int | None, changes: Sequence[str]
) -> str:
    """Add a line to ``starts.jsonl`` and make ``config.toml`` the configuration of this start (rank 0).

    Args:
        folder: the run's.
        config: what is in force from here on.
        world_size: ranks.
        layout: the parallel layout, as text.
        resumed_step: the step of the checkpoint that the run continues from; None = from the beginning.
        changes: keys that differ from the run so far, as text.

    Returns:
        What the user should know: where a ``config.toml`` went that no start of ours wrote. Mostly empty.
    """
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
    }
    # The record first: a config.toml that is in no record is the user's.
    whole = "".join(json.dumps(each) + "\n" for each in (*records, record))
    write_synced(folder / STARTS, whole)
    note = _keep_foreign_config(folder, records)
    write_synced(folder / CONFIG, text)
    return note


def load_run_config(folder: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run in a folder; its paths are those of the folder in which the run was started.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if not (folder / CONFIG).is_file() or not (folder / MARKER).is_file():
        raise ConfigError(f"{str(folder)!r} is not the folder of a run: expected its {CONFIG} and {MARKER} there")
    cwd = Path(read_starts(folder)[-1].get("cwd", "."))
    return load_config(folder / CONFIG, [*overrides, "--run.output_dir", str(folder)], relative_to=cwd)


def load_config_of_step(folder: Path, step: int, overrides: Sequence[str]) -> Config:
    """The configuration that a step of a run was trained with: that of the last start before it.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    load_run_config(folder, ())  # whether this is the folder of a run
    before = [start for start in read_starts(folder) if (start.get("resumed_step") or 0) < step]
    if not before:
        raise ConfigError(f"{folder / STARTS} has no start of the run before step {step}")
    start = before[-1]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG
        file.write_text(dump_toml(Config.model_validate(start["config"])), encoding="utf-8")
        own = [*overrides, "--run.output_dir", str(folder)]
        try:
            return load_config(file, own, relative_to=Path(start.get("cwd", ".")))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), str(folder / CONFIG))) from error


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run so far; lines that are damaged are left out."""
    try:
        lines = (folder / STARTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict)]


def _keep_foreign_config(folder: Path, records: Sequence[dict[str, Any]]) -> str:
    """Rename a ``config.toml`` that none of our starts wrote."""
    file = folder / CONFIG
    if not os.path.lexists(file) or _is_ours(file, records):
        return ""
    kept = file.with_name(f"{CONFIG}.{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while os.path.lexists(kept):
        number += 1
        kept = file.with_name(f"{CONFIG}.{time.strftime('%Y%m%d-%H%M%S')}-{number}")
    file.rename(kept)
    return f"note     {file} was edited; it is kept as {kept.name}, and {CONFIG} holds what is in force"


def _is_ours(file: Path, records: Sequence[dict[str, Any]]) -> bool:
    try:
        found = _sha256(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return any(record.get("config_sha256") == found for record in records)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
