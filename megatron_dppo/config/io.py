"""Load a ``Config`` from a TOML file and command-line overrides, and write it back."""

import copy
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_dppo.config.describe import closest_hint, exact_hint
from megatron_dppo.config.foreign_keys import REMOVED_KEYS
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.paths import read_tables, resolve_paths
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section, TomlTable
from megatron_dppo.config.user_functions import functions_as_text
from megatron_dppo.errors import ConfigError

FLAG_ALIASES: dict[str, tuple[str, str, object]] = {
    "bf16": ("model", "dtype", "bf16"),
    "no_bf16": ("model", "dtype", "fp32"),
    "seed": ("run", "seed", None),
    "wandb_project": ("log", "wandb_project", None),
    "allow_changed": ("checkpoint", "accept_changes", None),
}
"""Short flags, and Megatron flags whose key is in another section here: ``(section, key, value)``. A value of None
means that the flag takes one."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration file with overrides, and its problems."""

    config: Config | None
    """Configuration without the wrong flags, unknown keys and wrong values. None if nothing valid remains."""
    problems: list[str]
    """Text of each problem."""
    unreliable_sections: frozenset[str]
    """Sections in which a default replaced a wrong value. Conclusions from them do not apply to the intended run."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    relative_to: Path | None = None,
    with_functions: bool = False,
) -> Config:
    """Load and check a configuration.

    Args:
        path: TOML file. Relative paths of models and data are resolved against its folder if they exist there.
        overrides: ``--section.key value`` or ``--section.key=value``, and Megatron's own flags such as
            ``--tensor-model-parallel-size 2`` or ``--sequence-parallel``. Flags of Megatron's TransformerConfig without
            a section here (``--recompute-granularity full``) go to ``model.transformer``. The value ``null`` removes a
            key of the file.
        relative_to: Folder that its paths are relative to. None uses the file's folder.
        with_functions: Import the user functions of loss and advantages, and check how they are called. False executes
            nothing that the configuration names, and the loss cannot be computed.

    Raises:
        ConfigError: With every problem: unknown keys with the closest known one, wrong values, bad combinations.
    """
    loaded = read_config(path, overrides, relative_to=relative_to, with_functions=with_functions)
    if loaded.problems or loaded.config is None:
        raise invalid_config(path, loaded.problems)
    return loaded.config


def invalid_config(path: str | Path, problems: Sequence[str]) -> ConfigError:
    """Return the error that lists the problems of a configuration."""
    return ConfigError(f"{path} cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems))


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    relative_to: Path | None = None,
    with_functions: bool = False,
) -> LoadedConfig:
    """Load a configuration like ``load_config``, but return its problems instead of raising."""
    # Overrides come after the file and its bases, so they replace values of both.
    values = read_tables(Path(path), relative_to)
    parsed, problems = _parse_overrides(overrides)
    for section, key, value in parsed:
        try:
            _insert(values, section, key, value)
        except ConfigError as error:
            problems.append(str(error))
    resolve_paths(values, Path())  # those of the overrides
    with nullcontext() if with_functions else functions_as_text():
        return _read_values(values, problems)


def _read_values(values: TomlTable, problems: list[str]) -> LoadedConfig:
    """Validate repeatedly, and replace what is wrong each time, until nothing is wrong or nothing helps."""
    unreliable_sections: set[str] = set()
    while True:
        try:
            return LoadedConfig(Config.model_validate(values), problems, frozenset(unreliable_sections))
        except ValidationError as error:
            details = error.errors()
        # A later problem in a section with a replaced value may be a consequence of that value: skip it.
        reliable = [
            detail
            for detail in details
            if not unreliable_sections or (detail["loc"] and detail["loc"][0] not in unreliable_sections)
        ]
        problems += [text for text in _explain_all(reliable) if text not in problems]
        # A list, not a generator: every detail must be replaced, so any() must not stop at the first.
        if not any([_replace(values, detail["loc"]) for detail in details]):
            return LoadedConfig(None, problems, frozenset(unreliable_sections))
        # An unknown key leaves no default behind, so its section stays reliable.
        unreliable_sections |= {str(d["loc"][0]) for d in details if d["loc"] and d["type"] != "extra_forbidden"}


_PLACEHOLDERS: dict[str, TomlTable] = {
    "run": {"output_dir": ".", "num_steps": 1},
    "model": {"path": "."},
    "data": {"train": "task:chain_sum"},
    "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 1},
    "optimizer": {"lr": 1.0},
}
"""Values for missing or wrong keys without a default, so that the other sections can be checked."""


def _replace(values: TomlTable, location: tuple[int | str, ...]) -> bool:
    """Remove a key from nested tables, or set its placeholder. Return False if nothing changes."""
    path = [part for part in location if isinstance(part, str)]
    if not path:
        return False
    needed = _PLACEHOLDERS.get(path[0], {})
    # The problem concerns a section as a whole: it is missing, or a check across its keys failed.
    if len(path) == 1:
        before = values.pop(path[0], None)
        values |= {path[0]: dict(needed)} if needed else {}
        return bool(before != needed)
    # The problem concerns one key: walk to its table, and remove a value that stands where a table should be.
    table: Any = values
    for depth, part in enumerate(path[:-1]):
        if not isinstance(table.get(part), dict):
            return table.pop(part, None) is not None
        table = table[part]
        if depth + 2 < len(path) and not isinstance(table, dict):
            return False
    before = table.pop(path[-1], None)
    if len(path) == 2 and path[1] in needed:
        table[path[1]] = needed[path[1]]
        return bool(before != needed[path[1]])
    return before is not None


def validate(values: TomlTable, origin: str) -> Config:
    """Return a ``Config`` from nested dictionaries."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise invalid_config(origin, _explain_all(error.errors())) from error


def config_problems(values: TomlTable) -> list[str]:
    """Return the problems of nested dictionaries as a configuration, each once; they stay unchanged."""
    return _read_values(copy.deepcopy(values), []).problems


def dump_toml(config: Section) -> str:
    """Return the resolved configuration as TOML; loading it again gives an equal ``Config``."""
    import tomli_w  # An extra: the losses need the configuration's types alone.

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _insert(values: TomlTable, section: str, key: str, value: object) -> None:
    table = values
    for part in section.split("."):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--{section}.{key}: {part!r} is a key, not a section. `megatron-dppo help` lists the sections"
            )
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _parse_overrides(arguments: Sequence[str]) -> tuple[list[tuple[str, str, object]], list[str]]:
    """Return ``(section, key, value)`` of each flag in order, and the problems of the others."""
    result: list[tuple[str, str, object]] = []
    problems: list[str] = []
    remaining = list(arguments)
    while remaining:
        flag, equals, inline = remaining.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            problems.append(f"unexpected argument {flag!r}; overrides look like --section.key value")
            continue
        name = flag[2:]
        section, key, fixed = locate_flag(name)
        if fixed is not None:
            if equals:
                problems.append(
                    f"{flag} takes no value, got {inline!r}; remove the value, or remove the flag to keep the "
                    "configured value"
                )
            result.append((section, key, fixed))
            continue
        if equals:
            text = inline
        elif remaining and not remaining[0].startswith("--"):
            text = remaining.pop(0)
        elif "." not in name:
            text = "true"  # A switch of Megatron, such as --sequence-parallel.
        else:
            problems.append(f"{flag} needs a value: {flag} VALUE")
            continue
        result.append((section, key, _parse_value(text)))
    return result, problems


def locate_flag(name: str) -> tuple[str, str, object]:
    """Return section and key of a flag; the third part is its value if the flag takes none."""
    if "." in name:
        section, _, key = name.rpartition(".")
        return section, key.replace("-", "_"), None
    key = name.replace("-", "_")
    if key in FLAG_ALIASES:
        return FLAG_ALIASES[key]
    # Megatron's names are unique, so a flag without a section finds its key; --no-KEY sets it to false.
    for section, model in (("parallel", ParallelConfig), ("optimizer", OptimizerConfig)):
        if key in model.model_fields:
            return section, key, None
        if key.startswith("no_") and key[3:] in model.model_fields:
            return section, key[3:], False
    return "model.transformer", key, None


def _parse_value(text: str) -> object:
    """Return a TOML value, None for ``null`` (which TOML lacks), or the text itself."""
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain_all(details: Sequence[ErrorDetails]) -> list[str]:
    """Return one message for each cause: a misspelt key is not also a missing one."""
    unknown = [(detail, _explain(detail)) for detail in details if detail["type"] == "extra_forbidden"]

    def is_misspelt(detail: ErrorDetails) -> bool:
        section, key = detail["loc"][:-1], detail["loc"][-1]
        return any(other["loc"][:-1] == section and f"did you mean {key!r}?" in text for other, text in unknown)

    return [_explain(detail) for detail in details if detail["type"] != "missing" or not is_misspelt(detail)]


def _explain(detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    value, message = detail["input"], detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{path} = {value!r}: unknown key{_nearest(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{path} is missing; it has no default"
    if isinstance(value, dict):
        return f"{path}: {message}" if path else message
    is_scalar = detail["type"] in ("int_type", "float_type", "bool_type")
    if is_scalar and isinstance(value, str) and isinstance(_parse_value(value.strip()), bool | int | float):
        return f"{path} = {value!r}: {message}. Fix: write it without quotes: {value.strip()}"
    return f"{path} = {value!r}: {message}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """Return what replaces an unknown key: the closest known name, or the known keys of the section."""
    if replacement := REMOVED_KEYS.get(str(location[0])):
        return f"; {replacement}"
    model: Any = Config
    for part in location[:-1]:
        # A table of named sections, dict[str, Section]: its second argument is the type of a section.
        model = get_args(model)[1] if get_args(model) else model.known_fields()[part].annotation
    if hint := exact_hint(".".join(map(str, location))):
        return hint
    known = list(model.known_fields())
    close = get_close_matches(str(location[-1]), known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return closest_hint(".".join(map(str, location))) or f"; known keys: {', '.join(known)}"
