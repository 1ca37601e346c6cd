"""Translation of another framework's launch file into a configuration of this package."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.commands.port import prime_rl, slime, verl
from megatron_dppo.commands.port.draft import Draft, PortedSetting, Rule, apply_rules
from megatron_dppo.commands.port.shell import Word, find_launch
from megatron_dppo.config.io import config_problems
from megatron_dppo.errors import ConfigError

_KNOWN_VARIABLES = ("HOME", "PWD", "USER")
"""Environment variables that paths in a script may use."""


@dataclass(frozen=True)
class _Framework:
    name: str
    table: Mapping[str, Rule]
    patterns: Mapping[str, Rule]
    combine: Callable[[Draft], None]
    defaults: Mapping[str, Any]
    """Defaults of the framework that differ from this package's, by target key."""


_STACKS = {
    "verl": _Framework("verl", verl.TABLE, verl.PATTERNS, verl.combine, verl.DEFAULTS),
    "slime": _Framework("slime", slime.TABLE, slime.PATTERNS, slime.combine, slime.DEFAULTS),
    "prime-rl": _Framework("prime-rl", prime_rl.TABLE, prime_rl.PATTERNS, prime_rl.combine, prime_rl.DEFAULTS),
}


@dataclass(frozen=True)
class PortedConfig:
    """Translated configuration."""

    stack: str
    """``verl``, ``slime`` or ``prime-rl``."""
    toml: str
    rows: list[PortedSetting]
    problems: list[str]
    """Missing keys and wrong values. Empty if the configuration is valid."""
    num_processes: int | None
    """Processes of the original run. None if the file does not say."""


def port(path: Path) -> PortedConfig:
    """Read a launch script (``.sh``), hydra's overrides as YAML (``.yaml``, verl) or a TOML file (prime-rl).

    Nothing in the file is executed. Example: ``python -m verl.trainer.main_ppo data.max_response_length=512`` becomes
    ``[rollout] max_new_tokens = 512``, with a row for the setting and the problem that ``model.path`` is missing.

    Raises:
        ConfigError: The file cannot be read, or is none of these.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    stack, draft = _READERS.get(path.suffix, _reject_suffix)(path, content)
    stack.combine(draft)
    apply_rules(draft, stack.table, stack.patterns)
    # After the rules, so that a default never hides a setting of the file.
    for target, value in stack.defaults.items():
        draft.set_default(target, value, stack.name)
    if "output_dir" not in draft.values.setdefault("run", {}):
        draft.put("run.output_dir", f"runs/{path.stem}", note="named after the file")
    problems = config_problems(draft.values)
    return PortedConfig(
        stack.name, tomli_w.dumps(_sort_sections(draft.values)), draft.rows, problems, draft.num_processes
    )


def _read_shell(path: Path, content: str) -> tuple[_Framework, Draft]:
    environment = {name: os.environ[name] for name in _KNOWN_VARIABLES if name in os.environ}
    program, words = find_launch(path, content, environment, _first_argument)
    if program.endswith(("train.py", "train_async.py")):
        return _STACKS["slime"], _parse_flags(words)
    return _STACKS["verl"], _parse_overrides(words)


def _first_argument(words: Sequence[str]) -> int | None:
    """Return the index of the first argument of a training program. None for other commands."""
    for i, word in enumerate(words):
        if word == "-m" and i + 1 < len(words) and "main_" in words[i + 1]:
            return i + 2
        if word.rpartition("/")[2] in ("train.py", "train_async.py", "main_ppo.py", "main_dapo.py") and i > 0:
            return i + 1
    return None


def _parse_overrides(words: Sequence[Word]) -> Draft:
    """Parse hydra's ``key=value``, also with ``+`` and ``++`` for added keys."""
    source: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for word in words:
        key, equals, value = word.text.partition("=")
        if not equals or key.startswith(("-", "~", "$")):
            continue
        source[key.lstrip("+")] = value
        if word.unknown:
            unread[key.lstrip("+")] = word.unknown
    return Draft(source, unread)


def _parse_flags(words: Sequence[Word]) -> Draft:
    """Parse argparse's ``--key value ...`` into a list of values by flag."""
    source: dict[str, Any] = {}
    unread: dict[str, str] = {}
    key = ""
    for word in words:
        if word.unknown and word.text.endswith(("[@]}", "[*]}")):
            source[word.text], unread[word.text] = "", word.unknown
            continue
        if word.text.startswith("--"):
            key, equals, value = word.text[2:].partition("=")
            source[key] = [value] if equals else []
        elif key:
            source[key].append(word.text)
        if key and word.unknown:
            unread[key] = word.unknown
    return Draft(source, unread)


def _read_yaml(path: Path, content: str) -> tuple[_Framework, Draft]:
    import yaml

    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or not {"actor_rollout_ref", "data", "trainer"} & values.keys():
        raise ConfigError(f"{str(path)!r}: expected verl's tables (actor_rollout_ref, data, trainer)")
    settings = dict(_flatten(values))
    unread = {key: f"{value} is filled in by hydra" for key, value in settings.items() if "${" in str(value)}
    return _STACKS["verl"], Draft({key: value for key, value in settings.items() if value is not None}, unread)


def _read_toml(path: Path, content: str) -> tuple[_Framework, Draft]:
    try:
        values = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}") from error
    if not {"orchestrator", "trainer", "inference", "deployment"} & values.keys():
        raise ConfigError(f"{str(path)!r}: expected prime-rl's tables (orchestrator, trainer, inference)")
    return _STACKS["prime-rl"], Draft(dict(_flatten(values)))


def _reject_suffix(path: Path, content: str) -> tuple[_Framework, Draft]:
    raise ConfigError(f"{str(path)!r}: expected a launch script (.sh), verl's YAML or prime-rl's TOML, by its ending")


_READERS: dict[str, Callable[[Path, str], tuple[_Framework, Draft]]] = {
    ".sh": _read_shell,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
}


def _flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("a.b", 1)`` for nested tables, and ``a[0].b`` for a list of tables."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, name + ".")
        elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for i, part in enumerate(value):
                yield from _flatten(part, f"{name}[{i}].")
        else:
            yield name, value


def _sort_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Sort sections as in the documentation."""
    from megatron_dppo.config.schema import Config

    return {name: values[name] for name in Config.model_fields if name in values}
