"""Settings in a launch script, a YAML file or a TOML file, each known or unread."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.foreign_keys import FOREIGN_KEY_NAMES
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import read_regular_file
from megatron_dppo_port.budget import MAX_FILE_BYTES, spend
from megatron_dppo_port.defaults import FULLY_ASYNC, ONE_STEP_ASYNC, SLIME_ASYNC
from megatron_dppo_port.draft import Setting
from megatron_dppo_port.shell import Launch, find_launch, read_script
from megatron_dppo_port.shell_values import Word

if TYPE_CHECKING:
    import yaml

_KNOWN_VARIABLES = ("HOME", "PWD", "USER")
"""Environment variables that paths in a script may use."""
_NOT_PROGRAMS = re.compile(r"(.*/)?(echo|printf|pkill|kill|pgrep|ps|grep|cat|ls|cp|mv|rm|vim|sed|tail)", re.DOTALL)
_PROGRAMS = ("train.py", "train_async.py", "main_ppo.py", "main_dapo.py", "fully_async_main.py")
_MODULES = re.compile(r"(^|\.)(\w*main_\w+|fully_async_main|train|train_async)$")
_OTHER_PROGRAMS = re.compile(r"sft|generation|eval|convert")
_VERL_PROGRAMS = re.compile(r"^verl\.|(^|\.)main_dapo$|main_(ppo|dapo)\.py$|fully_async_main\.py$")
"""Programs whose loss is the one that verl's settings name."""
_SHIPPED_CONFIG = re.compile(r"(fully_async_)?ppo_(megatron_)?trainer")
"""Names of verl's own configurations. Their values are the defaults of its version."""
_KEY = re.compile(r"[+~]*[A-Za-z_][\w./@-]*=")
_NODE_STEPS = 50
_LONGEST_NAME = 1000
"""Longest name of a program or module. A longer word is none."""
OTHER_FILES = (
    "There is no port for TRL, NeMo-RL and other Python programs. Fix: write the TOML by hand (docs/from_verl.md); "
    "megatron-dppo help {name} shows the key here for a name there"
)


@dataclass
class SourceFile:
    """Settings of a file and the framework that they belong to."""

    framework: str
    settings: dict[str, Setting] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the program that differ from the framework's."""
    problems: list[str] = field(default_factory=list)
    """Parts of the file that may set any key and were not read."""


def read_shell(path: Path, root: Path, variables: Mapping[str, str]) -> SourceFile:
    """Read a launch script of verl or slime."""
    environment = {name: os.environ[name] for name in _KNOWN_VARIABLES if name in os.environ} | dict(variables)
    script = read_script(read_text(path), environment, path, root)
    launch = find_launch(path, script, first_argument)
    program = launch.program[-1].text
    is_slime = program.rpartition("/")[2] in _PROGRAMS[:2] or program.rpartition(".")[2] in ("train", "train_async")
    source = SourceFile("slime" if is_slime else "verl", problems=launch.problems)
    if not is_slime:
        _read_verl_launch(source, launch, path, root)
        return source
    if "train_async" in program:
        source.defaults = dict(SLIME_ASYNC)
    _parse_flags(source, launch.arguments)
    return source


def read_text(path: Path) -> str:
    """Return the text of a file."""
    try:
        return read_regular_file(path, MAX_FILE_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}. Expected a UTF-8 text file of at most {MAX_FILE_BYTES >> 10} KiB"
        ) from error


def first_argument(words: Sequence[str]) -> int | None:
    """Return the index of the first argument of a training program. None for other commands."""
    if words and _NOT_PROGRAMS.fullmatch(words[0]):
        return None
    for i, word in enumerate(words):
        module = words[i + 1] if i + 1 < len(words) else ""
        if word == "-m" and len(module) <= _LONGEST_NAME and _MODULES.search(module):
            return None if _OTHER_PROGRAMS.search(module) else i + 2
        # The word before it is the interpreter.
        if word.rpartition("/")[2] in _PROGRAMS and i > 0:
            return i + 1
    return None


def _read_verl_launch(source: SourceFile, launch: Launch, path: Path, root: Path) -> None:
    program = launch.program[-1].text
    if "fully_async" in program:
        source.defaults = dict(FULLY_ASYNC)
    elif "one_step_off" in program:
        source.defaults = dict(ONE_STEP_ASYNC)
    if not _VERL_PROGRAMS.search(program):
        source.problems.append(f"{program} is not verl's own program and may have another loss. Fix: check [loss]")
    name = _option(launch.arguments, ("--config-name", "-cn"))
    folder = _option(launch.arguments, ("--config-path", "-cp"))
    if name is not None and not _SHIPPED_CONFIG.fullmatch(name.text.removesuffix(".yaml")):
        _read_hydra_config(source, name, folder, path, root, program)
    # Hydra's ``key=value``, also with ``+`` and ``++`` for added keys. The last one counts.
    for word, text in _read_words(source, launch.arguments):
        key, _, value = text.partition("=")
        if _KEY.match(text) and not text.startswith("-"):
            source.settings[key.lstrip("+~")] = _setting(word, value)
        elif word.unknown and text and not text.startswith("-"):
            _add_opaque(source, word)
    resolve_references(source)


def _option(words: Sequence[Word], names: Sequence[str]) -> Word | None:
    """Return the value of ``--name value`` or ``--name=value``. None if it is not there."""
    for i, word in enumerate(words):
        key, equals, value = word.text.partition("=")
        if key in names:
            return Word(value, word.unknown) if equals else words[i + 1] if i + 1 < len(words) else None
    return None


def _read_hydra_config(
    source: SourceFile, name: Word, folder: Word | None, path: Path, root: Path, module: str
) -> None:
    """Read the configuration that ``--config-name`` selects, below the command's own settings."""
    file = _find_config(name, folder, (root, path.parent, root / Path(*module.split(".")[:-1])), root)
    if file is None:
        source.problems.append(
            f"--config-name {name.text}: its file was not read; it may set any key. Fix: --root with the folder of "
            "verl's repository, if it has the file"
        )
        return
    _add_yaml(source, _load_yaml(file), f"{file.name}: its entry")


def _add_yaml(source: SourceFile, values: dict[str, Any], entry_name: str) -> None:
    """Add the settings of hydra's YAML, and a problem for each other file that it names."""
    for entry in values.pop("defaults", None) or []:
        if entry != "_self_" and not _SHIPPED_CONFIG.fullmatch(str(entry)):
            source.problems.append(f"{entry_name} {entry!r} in defaults was not read; it may set any key")
    source.settings |= {key: Setting(value) for key, value in flatten(values) if not key.startswith("hydra.")}


def _find_config(name: Word, folder: Word | None, starts: Sequence[Path], root: Path) -> Path | None:
    if name.unknown or (folder is not None and folder.unknown):
        return None
    file_name = name.text.removesuffix(".yaml") + ".yaml"
    for start in starts:
        file = Path(start, folder.text if folder is not None else "", file_name).resolve()
        if file.is_file() and file.is_relative_to(root.resolve()):
            return file
    return None


def _read_words(source: SourceFile, words: Sequence[Word]) -> Iterator[tuple[Word, str]]:
    """Yield each word with each text that it may have. Record words of files that were not read."""
    for word in words:
        if word.source:
            source.settings[word.source] = Setting("", word.blank)
            continue
        for choice in word.alternatives or (word,):
            yield word, choice.text


def _setting(word: Word, value: Any) -> Setting:
    return Setting(value, word.unknown or word.blank)


def _add_opaque(source: SourceFile, word: Word) -> None:
    source.settings[word.text] = Setting("", word.unknown)
    source.problems.append(f"the words {word.text} are unknown ({word.unknown}); they may set any key")


def _parse_flags(source: SourceFile, words: Sequence[Word]) -> None:
    """Parse argparse's ``--key value ...`` into a list of values by flag. The last one counts."""
    key = ""
    for word, text in _read_words(source, words):
        name, equals, value = text[2:].partition("=")
        if text.startswith("--") and name:
            key = name
            source.settings[key] = _setting(word, [value] if equals else [])
        elif not text and word.unknown:
            continue
        elif key and not (word.unknown and _is_opaque(text, source.settings[key])):
            before = source.settings[key]
            source.settings[key] = Setting([*before.value, text], before.unread or word.unknown or word.blank)
        elif word.unknown:
            _add_opaque(source, word)
    if "custom-config-path" in source.settings:
        source.problems.append("--custom-config-path: its file was not read; it may set any argument")


def _is_opaque(text: str, setting: Setting) -> bool:
    """Return True if an unknown word may be several words with flags of their own, and not a value of the setting."""
    return text.endswith(("[@]}", "[*]}")) or (bool(setting.value) and re.fullmatch(r"\$\{?\w+\}?", text) is not None)


def read_yaml(path: Path, root: Path, variables: Mapping[str, str]) -> SourceFile:
    """Read verl's settings as YAML."""
    values = _load_yaml(path)
    if not {"actor_rollout_ref", "data", "trainer"} & values.keys():
        name = next((str(key) for key in values if key in FOREIGN_KEY_NAMES), "num_generations")
        tables = "expected verl's tables (actor_rollout_ref, data, trainer)"
        raise ConfigError(f"{str(path)!r}: {tables}. {OTHER_FILES.format(name=name)}")
    source = SourceFile("verl")
    _add_yaml(source, values, "the entry")
    resolve_references(source)
    return source


def _load_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loader = yaml.SafeLoader(read_text(path))
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{str(path)!r} is empty; expected verl's tables (actor_rollout_ref, data, trainer)")
        # An alias stands for a copy of what its anchor names, so it is counted before it is copied.
        spend(_expanded_size(node, {}))
        values = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r}: expected verl's tables (actor_rollout_ref, data, trainer)")
    return values


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the characters and nodes of a YAML node with a copy for each alias.

    A size of 0 in ``sizes``, by identity, marks a node whose parts are being counted.
    """
    size = sizes.get(id(node))
    if size is None:
        sizes[id(node)] = 0
        parts = node.value if isinstance(node.value, list) else []
        size = _NODE_STEPS + (0 if parts else len(node.value))
        for part in parts:
            for child in part if isinstance(part, tuple) else (part,):
                size += _expanded_size(child, sizes)
        # Before the numbers get long themselves.
        spend(size)
        sizes[id(node)] = size
    elif not size:
        raise ConfigError("The YAML has an anchor that contains itself. Fix: write the values out")
    return size


def resolve_references(source: SourceFile) -> None:
    """Replace ``${data.max_response_length}`` by the value of that setting. Other forms make a setting unread."""
    for key, setting in source.settings.items():
        if setting.unread or "${" not in str(setting.value):
            continue
        match = re.fullmatch(r"['\"]?\$\{([\w.]+)\}['\"]?", str(setting.value))
        other = source.settings.get(match.group(1)) if match else None
        if other is not None and "${" not in str(other.value):
            source.settings[key] = other
        else:
            source.settings[key] = Setting(setting.value, f"{setting.value} is filled in by hydra")


def read_toml(path: Path, root: Path, variables: Mapping[str, str]) -> SourceFile:
    """Read prime-rl's configuration."""
    try:
        values = tomllib.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}") from error
    # The trainer's and the fine-tuning's own files have [optim] or [data] at their top level.
    if not {"orchestrator", "trainer", "inference", "deployment"} & values.keys() or {"optim", "data"} & values.keys():
        raise ConfigError(f"{str(path)!r}: expected prime-rl's tables (orchestrator, trainer, inference)")
    return SourceFile("prime-rl", {key: Setting(value) for key, value in flatten(values)})


def flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("a.b", 1)`` for nested tables, and ``a[0].b`` for a list of tables."""
    for key, value in values.items():
        name = f"{before}{key}"
        spend(_NODE_STEPS + len(name))
        if isinstance(value, dict) and value:
            yield from flatten(value, name + ".")
        elif isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for i, part in enumerate(value):
                yield from flatten(part, f"{name}[{i}].")
        else:
            yield name, value
