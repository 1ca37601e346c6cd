"""Paths of a configuration, which are relative to its file where they exist there."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, FILE_OPTIONS
from megatron_dppo.errors import ConfigError

_PATHS = (
    ("model", "path"),
    ("model", "reference_path"),
    ("distillation", "teacher_path"),
    ("checkpoint", "fork_from"),
    ("data", "train"),
    ("data", "eval"),
    ("warmup", "data"),
)


_FUNCTIONS = (
    ("reward", "function"),
    ("rollout", "generate"),
    ("agent", "function"),
    ("loss", "name"),
    ("loss", "mask"),
    ("train", "advantage"),
)
"""Where a path is one only with a function behind it: ``path/to/file.py:function``."""


def resolve_paths(values: dict[str, Any], folder: Path) -> None:
    """Make the paths of a configuration's models, data, functions and programs relative to the working directory."""
    for section, key in (*_PATHS, *_FUNCTIONS):
        table = values.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        if (section, key) in _PATHS or ".py:" in str(table[key]):
            table[key] = _beside(table[key], folder)
    _resolve_program(values, folder, "rollout", "servers", "command")
    _resolve_served_model(values, folder)
    _resolve_program(values, folder, "agent", "command")
    _resolve_rewards(values.get("reward"), folder)


def _resolve_program(values: dict[str, Any], folder: Path, *place: str) -> None:
    """The path of a program and of Python files that it is given; a bare name is looked up in PATH."""
    table: Any = values
    for part in place:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, list) and table and isinstance(table[0], str) and "/" in table[0]:
        # Not a Path: "./serve" must keep its slash.
        beside = os.path.join(folder, table[0])
        table[0] = beside if os.path.exists(beside) else table[0]
    if isinstance(table, list) and place[0] == "agent":
        table[1:] = [_beside(part, folder) if str(part).endswith(".py") else part for part in table[1:]]


def _resolve_served_model(values: dict[str, Any], folder: Path) -> None:
    rollout = values.get("rollout")
    servers = rollout.get("servers") if isinstance(rollout, dict) else None
    if isinstance(servers, dict) and "model" in servers:
        servers["model"] = _beside(servers["model"], folder)


def _resolve_rewards(reward: Any, folder: Path) -> None:
    """Files of several reward functions, and those in the options of built-in ones."""
    functions = reward.get("functions") if isinstance(reward, dict) else None
    several = [each for each in functions.values() if isinstance(each, dict)] if isinstance(functions, dict) else []
    for table in several:
        if ".py:" in str(table.get("function")):
            table["function"] = _beside(table["function"], folder)
    for table in [reward, *several] if isinstance(reward, dict) else []:
        options = table.get("options")
        if table.get("function") in BUILT_IN_REWARDS and isinstance(options, dict):
            options |= {key: _beside(options[key], folder) for key in FILE_OPTIONS if key in options}


def _beside(value: Any, folder: Path) -> Any:
    """A path that exists in ``folder``, as seen from here; in lists and tables each. Anything else as it is."""
    if isinstance(value, list):
        return [_beside(part, folder) for part in value]
    if isinstance(value, dict):
        return {name: _beside(part, folder) for name, part in value.items()}
    if not isinstance(value, str) or value.startswith(("task:", "hf:")):
        return value
    file = value.rpartition(".py:")[0] + ".py" if ".py:" in value else value  # path/to/file.py:function
    return str(folder / value) if (folder / file).exists() else value


def read_tables(file: Path, relative_to: Path | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file with ``extends`` carried out, and with paths as seen from the working directory.

    Example: ``b.toml`` holds ``extends = "a.toml"`` and ``[loss] topk = 8``; of ``[loss] name = "dppo_topk_tv"`` in
    ``a.toml`` and its other tables nothing is lost.

    Args:
        file: of the configuration.
        relative_to: the folder that its paths are relative to; None = the file's. That of a file which is extended is
            its own.
        seen: the files that extend this one, resolved.

    Raises:
        ConfigError: there is no such file, or it is no TOML, or files extend each other in a circle.
    """
    where = f" (which {str(seen[-1])!r} extends)" if seen else ""
    place = file.resolve()
    if place in seen:
        circle = " -> ".join(str(path) for path in (*seen[seen.index(place) :], place))
        raise ConfigError(f"configuration files extend each other in a circle: {circle}; take one 'extends' out")
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} does not exist") from error
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} is not valid TOML: {error}") from error
    base = values.pop("extends", None)
    resolve_paths(values, relative_to or file.parent)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{file}: extends = {base!r}: expected the path of one TOML file, relative to this one")
    return merge_tables(read_tables(file.parent / base, None, (*seen, place)), values)


def merge_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says: tables key by key, anything else replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge_tables(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
