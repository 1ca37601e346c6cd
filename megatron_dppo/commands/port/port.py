"""A file of another framework read, and written down as ours."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.commands.port import prime_rl, slime, verl
from megatron_dppo.commands.port.draft import Draft, PortedSetting, Rule, apply
from megatron_dppo.commands.port.shell import Word, launch_of
from megatron_dppo.config.io import config_problems
from megatron_dppo.errors import ConfigError

_KNOWN = ("HOME", "PWD", "USER")
"""variables of the environment that a path in a script may be made of"""


@dataclass(frozen=True)
class _Stack:
    name: str
    table: Mapping[str, Rule]
    patterns: Mapping[str, Rule]
    combine: Callable[[Draft], None]
    defaults: Mapping[str, Any]
    """our key -> what is in force there, where ours would be another"""


_STACKS = {
    "verl": _Stack("verl", verl.TABLE, verl.PATTERNS, verl.combine, verl.DEFAULTS),
    "slime": _Stack("slime", slime.TABLE, slime.PATTERNS, slime.combine, slime.DEFAULTS),
    "prime-rl": _Stack("prime-rl", prime_rl.TABLE, prime_rl.PATTERNS, prime_rl.combine, prime_rl.DEFAULTS),
}


@dataclass(frozen=True)
class Ported:
    """A configuration, and what it came from."""

    stack: str
    """``verl``, ``slime`` or ``prime-rl``"""
    toml: str
    rows: list[PortedSetting]
    problems: list[str]
    """what a configuration of this package still lacks, or has wrong; empty = it can be started"""
    num_processes: int | None
    """that theirs was started with; None = the file does not say"""


def port(path: Path) -> Ported:
    """Read a launch script (``.sh``), hydra's overrides as YAML (``.yaml``, verl) or a TOML file (prime-rl).

    Nothing of the file is run. Example: of ``python -m verl.trainer.main_ppo data.max_response_length=512`` comes
    ``[rollout] max_new_tokens = 512``, a row that says so, and the problem that ``model.path`` is missing.

    Raises:
        ConfigError: the file is none of these, or cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    stack, draft = _READERS.get(path.suffix, _unknown)(path, content)
    stack.combine(draft)
    apply(draft, stack.table, stack.patterns)
    for ours, value in stack.defaults.items():
        draft.default(ours, value, stack.name)
    if "output_dir" not in draft.values.setdefault("run", {}):
        draft.put("run.output_dir", f"runs/{path.stem}", note="named after the file")
    found = config_problems(draft.values)
    return Ported(stack.name, tomli_w.dumps(_ordered(draft.values)), draft.rows, found, draft.num_processes)


def _shell(path: Path, content: str) -> tuple[_Stack, Draft]:
    environment = {name: os.environ[name] for name in _KNOWN if name in os.environ}
    program, words = launch_of(path, content, environment, _first_argument)
    if program.endswith(("train.py", "train_async.py")):
        return _STACKS["slime"], _flags(words)
    return _STACKS["verl"], _overrides(words)


def _first_argument(words: Sequence[str]) -> int | None:
    """Where the arguments of a training program begin."""
    for i, word in enumerate(words):
        if word == "-m" and i + 1 < len(words) and "main_" in words[i + 1]:
            return i + 2
        if word.rpartition("/")[2] in ("train.py", "train_async.py", "main_ppo.py", "main_dapo.py") and i > 0:
            return i + 1
    return None


def _overrides(words: Sequence[Word]) -> Draft:
    """hydra's ``key=value``, with ``+`` and ``++`` before keys that are added."""
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


def _flags(words: Sequence[Word]) -> Draft:
    """argparse's ``--key value ...``: a list of the values behind each flag."""
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


def _yaml(path: Path, content: str) -> tuple[_Stack, Draft]:
    import yaml

    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or not {"actor_rollout_ref", "data", "trainer"} & values.keys():
        raise ConfigError(f"{str(path)!r}: expected verl's tables (actor_rollout_ref, data, trainer)")
    found = dict(_leaves(values))
    unread = {key: f"{value} is filled in by hydra" for key, value in found.items() if "${" in str(value)}
    return _STACKS["verl"], Draft({key: value for key, value in found.items() if value is not None}, unread)


def _toml(path: Path, content: str) -> tuple[_Stack, Draft]:
    try:
        values = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}") from error
    if not {"orchestrator", "trainer", "inference", "deployment"} & values.keys():
        raise ConfigError(f"{str(path)!r}: expected prime-rl's tables (orchestrator, trainer, inference)")
    return _STACKS["prime-rl"], Draft(dict(_leaves(values)))


def _unknown(path: Path, content: str) -> tuple[_Stack, Draft]:
    raise ConfigError(f"{str(path)!r}: expected a launch script (.sh), verl's YAML or prime-rl's TOML, by its ending")


_READERS: dict[str, Callable[[Path, str], tuple[_Stack, Draft]]] = {
    ".sh": _shell,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": _toml,
}


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """``("a.b", 1)`` of nested tables; of a list of tables ``a[0].b``."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, name + ".")
        elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for i, part in enumerate(value):
                yield from _leaves(part, f"{name}[{i}].")
        else:
            yield name, value


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """Sections in the order of the documentation, plain keys before tables."""
    from megatron_dppo.config.schema import Config

    return {name: values[name] for name in Config.model_fields if name in values}
