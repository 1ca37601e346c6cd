"""TOML file and command-line overrides to a checked ``Config``, and back."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_dppo.config import Config, OptimizerConfig, ParallelConfig
from megatron_dppo.errors import ConfigError

_ALIASES: dict[str, tuple[str, str, Any]] = {
    "bf16": ("model", "dtype", "bf16"),
    "no_bf16": ("model", "dtype", "fp32"),
    "seed": ("run", "seed", None),
    "wandb_project": ("log", "wandb_project", None),
}
"""Megatron's flags that live in another section here: name -> (section, key, value or None = takes one)."""

_PATHS = (
    ("model", "path"),
    ("data", "train"),
    ("data", "eval"),
    ("warmup", "data"),
    ("reward", "function"),
    ("rollout", "generate"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    Args:
        path: a TOML file. Paths to models and data in it are taken relative to the file when they exist there.
        overrides: ``--section.key value`` or ``--section.key=value``, and Megatron's own flags such as
            ``--tensor-model-parallel-size 2`` or ``--sequence-parallel``; flags of Megatron's TransformerConfig that
            have no section here (``--recompute-granularity full``) go to ``model.transformer``.

    Raises:
        ConfigError: with every problem found: unknown keys with the nearest known one, wrong values, bad combinations.
    """
    file = Path(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {str(path)!r} does not exist") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: {error}") from error
    _resolve_paths(values, file.parent)
    for section, key, value in _parse_overrides(overrides):
        _insert(values, section, key, value)
    return validate(values, str(path))


def validate(values: dict[str, Any], origin: str) -> Config:
    """A ``Config`` from nested dictionaries, or a ConfigError that lists every problem."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(f"  - {_explain(detail)}" for detail in error.errors())
        raise ConfigError(f"{origin} cannot be used:\n{problems}") from error


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML; loading it again gives an equal ``Config``."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    for section, key in _PATHS:
        table = values.get(section)
        if isinstance(table, dict) and key in table:
            table[key] = _beside(table[key], folder)
    _resolve_program(values, folder)


def _resolve_program(values: dict[str, Any], folder: Path) -> None:
    """The path of a program in ``rollout.servers.command``; a bare name is looked up in PATH."""
    table: Any = values
    for part in ("rollout", "servers", "command"):
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, list) and table and isinstance(table[0], str) and "/" in table[0]:
        # Not a Path: "./serve" must keep its slash.
        beside = os.path.join(folder, table[0])
        table[0] = beside if os.path.exists(beside) else table[0]


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


def _insert(values: dict[str, Any], section: str, key: str, value: Any) -> None:
    table = values
    for part in section.split("."):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--{section}.{key}: {part!r} is a value, not a section")
    table[key] = value


def _parse_overrides(arguments: Sequence[str]) -> list[tuple[str, str, Any]]:
    """``(section, key, value)`` of each flag, in order."""
    result = []
    rest = list(arguments)
    while rest:
        flag, equals, inline = rest.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"unexpected argument {flag!r}; overrides look like --section.key value")
        name = flag[2:]
        section, key, fixed = _locate(name)
        if fixed is not None:
            if equals:
                raise ConfigError(f"{flag} takes no value, got {inline!r}; leave it out to keep the configured value")
            result.append((section, key, fixed))
            continue
        if equals:
            text = inline
        elif rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif "." not in name:
            text = "true"  # Megatron's switches, such as --sequence-parallel
        else:
            raise ConfigError(f"{flag} needs a value: {flag} VALUE")
        result.append((section, key, _parse_value(text)))
    return result


def _locate(name: str) -> tuple[str, str, Any]:
    """Section and key of a flag; the third part is its value when the flag takes none."""
    if "." in name:
        section, _, key = name.rpartition(".")
        return section, key.replace("-", "_"), None
    key = name.replace("-", "_")
    if key in _ALIASES:
        return _ALIASES[key]
    for section, model in (("parallel", ParallelConfig), ("optimizer", OptimizerConfig)):
        if key in model.model_fields:
            return section, key, None
        if key.startswith("no_") and key[3:] in model.model_fields:
            return section, key[3:], False
    return "model.transformer", key, None


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    value, message = detail["input"], detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{place} = {value!r}: unknown key{_nearest(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{place} is missing; it has no default"
    if isinstance(value, dict):
        return f"{place}: {message}" if place else message
    return f"{place} = {value!r}: {message}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """The closest known name for an unknown key, and what the section knows."""
    model: Any = Config
    for part in location[:-1]:
        model = model.model_fields[part].annotation
    known = list(model.model_fields)
    close = get_close_matches(str(location[-1]), known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
