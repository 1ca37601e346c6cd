"""Paths in a configuration.

A relative path that exists is made absolute: in the folder of its file first, then in the working directory. So a
configuration means the same from every folder, and records of a run do not depend on the spelling of its paths.
"""

import os
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_dppo.config.container import CONTAINER_TOOLS
from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, FILE_OPTIONS
from megatron_dppo.config.section import TomlTable
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import read_regular_file
from megatron_dppo.source_names import HUB, TASK

_PATHS = (
    ("model", "path"),
    ("model", "reference_path"),
    ("distillation", "teacher_path"),
    ("checkpoint", "fork_from"),
    ("data", "train"),
    ("data", "eval"),
    ("rollout", "servers", "model"),
)
"""Keys whose values are paths or data sources."""

FUNCTION_KEYS = (
    ("reward", "function"),
    ("rollout", "generate"),
    ("agent", "function"),
    ("loss", "name"),
    ("loss", "mask"),
    ("train", "advantage"),
)
"""Keys whose value is a path only in the form ``path/to/file.py:function``."""


def is_function_key(key: str) -> bool:
    """Return True if ``section.key`` may name a user function."""
    section, _, name = key.partition(".")
    return (section, name) in FUNCTION_KEYS or fnmatchcase(key, "reward.functions.*.function")


def resolve_paths(values: TomlTable, folder: Path) -> None:
    """Make the paths of models, data, functions and programs absolute, if they exist."""
    for *sections, key in (*_PATHS, *FUNCTION_KEYS):
        table = _find(values, sections)
        if not isinstance(table, dict) or key not in table:
            continue
        if (*sections, key) in _PATHS or ".py:" in str(table[key]):
            table[key] = _resolve(table[key], folder)
    _resolve_program(values, folder, "rollout", "servers", "command")
    agent = values.get("agent")
    if not isinstance(agent, dict) or agent.get("isolation") not in CONTAINER_TOOLS:
        _resolve_program(values, folder, "agent", "command")
    _resolve_rewards(values.get("reward"), folder)


def _resolve_program(values: TomlTable, folder: Path, *key_path: str) -> None:
    """Resolve the path of a program and of its Python files; a bare name is looked up in PATH."""
    table = _find(values, key_path)
    if isinstance(table, list) and table and isinstance(table[0], str) and "/" in table[0]:
        table[0] = _resolve(table[0], folder)
    if isinstance(table, list) and key_path[0] == "agent":
        table[1:] = [_resolve(part, folder) if str(part).endswith(".py") else part for part in table[1:]]


def _find(values: Any, key_path: Sequence[str]) -> Any:
    for part in key_path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _resolve_rewards(reward: object, folder: Path) -> None:
    """Resolve the files of several reward functions, and those in the options of built-in functions."""
    functions = reward.get("functions") if isinstance(reward, dict) else None
    several = [each for each in functions.values() if isinstance(each, dict)] if isinstance(functions, dict) else []
    for table in several:
        if ".py:" in str(table.get("function")):
            table["function"] = _resolve(table["function"], folder)
    for table in [reward, *several] if isinstance(reward, dict) else []:
        options = table.get("options")
        if str(table.get("function")) in BUILT_IN_REWARDS and isinstance(options, dict):
            options |= {key: _resolve(options[key], folder) for key in FILE_OPTIONS if key in options}


def _resolve(value: Any, folder: Path) -> Any:
    """Return a path that exists in ``folder`` or the working directory as absolute; lists and tables part by part."""
    if isinstance(value, list):
        return [_resolve(part, folder) for part in value]
    if isinstance(value, dict):
        return {name: _resolve(part, folder) for name, part in value.items()}
    # Embedded tasks and Hugging Face data sets are names, not paths.
    if not isinstance(value, str) or not value or value.startswith((TASK, HUB)):
        return value
    file, function = split_function(value)
    for start in (folder, Path()):
        if os.path.exists(start / file):  # False, not an error, for text that is no path
            return absolute_path(start / file) + function
    return value


def split_function(value: str) -> tuple[str, str]:
    """Return the path of a value, and the ``:function`` that follows a Python file (empty for other values)."""
    head, separator, function = value.rpartition(".py:")
    return (f"{head}.py", f":{function}") if separator else (value, "")


def absolute_path(path: Path) -> str:
    """Return an absolute path without ``.`` and ``..``. Links stay, because a link's name may carry the file type."""
    joined = os.path.join(os.getcwd(), path)
    normal = os.path.normpath(joined)
    # "link/.." is not the folder of the link.
    return normal if os.path.realpath(normal) == os.path.realpath(joined) else joined


def read_tables(file: Path, relative_to: Path | None = None, extended_by: tuple[Path, ...] = ()) -> TomlTable:
    """Return the tables of a file with ``extends`` applied and paths made absolute (``resolve_paths``).

    Example: ``b.toml`` contains ``extends = "a.toml"`` and ``[loss] topk = 8``. The result keeps ``[loss] name =
    "dppo_topk_tv"`` of ``a.toml``, and its other tables.

    Its paths are relative to ``relative_to``, or to the folder of the file if that is None; those of an extended file
    always to its own folder. ``extended_by`` are the files that extend this one, for the detection of cycles.
    """
    where = f" (which {str(extended_by[-1])!r} extends)" if extended_by else ""
    if "\0" in str(file):
        raise ConfigError(f"configuration file {str(file)!r}{where} has a null character in its name")
    try:
        resolved = file.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ConfigError(f"configuration file {str(file)!r}{where} cannot be read: {error}") from error
    if resolved in extended_by:
        cycle = " -> ".join(str(path) for path in (*extended_by[extended_by.index(resolved) :], resolved))
        raise ConfigError(f"configuration files extend each other in a cycle: {cycle}; remove one 'extends'")
    try:
        # Process substitution gives a pipe here: train <(make-config).
        is_pipe = not extended_by and str(file).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))
        content = file.read_bytes() if is_pipe else read_regular_file(file)
        values = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        raise ConfigError(
            f"configuration file {str(file)!r}{where} does not exist. Expected the path of a TOML file"
        ) from error
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} is not valid TOML: {error}") from error
    base = values.pop("extends", None)
    # Resolve before merging: the paths of each file are relative to that file.
    resolve_paths(values, relative_to or file.parent)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{file}: extends = {base!r}: expected the path of one TOML file, relative to this one")
    return merge_tables(read_tables(file.parent / base, None, (*extended_by, resolved)), values)


def merge_tables(base: TomlTable, over: TomlTable) -> TomlTable:
    """Return ``base`` updated with ``over``: tables key by key, anything else replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge_tables(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
