"""Translation of another framework's launch file into a configuration of this package."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.config.io import config_problems
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.report.printable import printable_toml
from megatron_dppo_port import prime_rl, slime, verl
from megatron_dppo_port.budget import limited
from megatron_dppo_port.defaults import DEFAULTS
from megatron_dppo_port.draft import FILL_IN, Draft, PortedSetting, apply_rules, leave_without_counterpart
from megatron_dppo_port.settings import OTHER_FILES, SourceFile, read_shell, read_toml, read_yaml

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9_]", re.ASCII)
"""``owner/name``. A folder is written with a slash, a dot or a tilde before it."""
_MAX_SETTINGS = 10_000
_FIX = "Fix: give the training command itself"
_FRAMEWORKS = {"verl": verl, "slime": slime, "prime-rl": prime_rl}
"""Modules with ``NO_COUNTERPARTS``, ``TABLE``, ``PATTERNS`` and ``combine``."""
_READERS: dict[str, Callable[[Path, Path, Mapping[str, str]], SourceFile]] = {
    ".sh": read_shell,
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".toml": read_toml,
}


@dataclass(frozen=True)
class PortedConfig:
    """Translated configuration."""

    stack: str
    """``verl``, ``slime`` or ``prime-rl``."""
    version: str
    """Version of the framework whose defaults were used."""
    toml: str
    rows: list[PortedSetting]
    problems: list[str]
    """Keys to fill in, missing keys and wrong values. Empty if the configuration is valid and complete."""
    num_processes: int | None
    """Processes of the original run. None if the file does not say."""
    loss: Mapping[str, Any]
    hub_name: str | None
    """``model.path`` if it is a name of the Hugging Face hub, which has to be downloaded. None for a folder."""


def port(
    path: Path, *, version: str | None = None, root: Path | None = None, variables: Mapping[str, str] | None = None
) -> PortedConfig:
    """Read a launch script (``.sh``), hydra's overrides as YAML (``.yaml``, verl) or a TOML file (prime-rl).

    Nothing in the file is executed. Example: ``python -m verl.trainer.main_ppo data.max_response_length=512`` becomes
    ``[rollout] max_new_tokens = 512``, with a row for the setting and the problem that ``model.path`` is missing.

    Args:
        path: The file.
        version: Version of the framework whose defaults apply. None uses the newest release.
        root: Folder inside which ``source`` and hydra's configurations are read. None uses the folder of the file.
        variables: Values of variables that the script expects from its environment.

    Raises:
        ConfigError: The file cannot be read, is none of these, or the version is unknown.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        endings = "expected a launch script (.sh), verl's YAML or prime-rl's TOML, by its ending"
        raise ConfigError(f"{str(path)!r}: {endings}. {OTHER_FILES.format(name='num_generations')}")
    try:
        with limited():
            return translate(reader(path, root or path.parent, variables or {}), path.stem, version)
    except RecursionError as error:
        raise ConfigError(f"{str(path)!r} is nested too deeply for a launch script. {_FIX}") from error
    except (MemoryError, ValueError, OSError) as error:
        # Nothing in a stranger's file may end in a traceback.
        raise ConfigError(f"{str(path)!r} cannot be read ({type(error).__name__}: {error}). {_FIX}") from error


def translate(source: SourceFile, name: str, version: str | None = None) -> PortedConfig:
    """Translate the settings of a file. ``name`` is that of a run whose file has none."""
    if len(source.settings) > _MAX_SETTINGS:
        raise ConfigError(f"The file has {len(source.settings):,} settings, more than {_MAX_SETTINGS:,}. {_FIX}")
    version = version or next(iter(DEFAULTS[source.framework]))
    if version not in DEFAULTS[source.framework]:
        known = ", ".join(DEFAULTS[source.framework])
        raise ConfigError(f"--framework-version {version!r}: expected a version of {source.framework}: {known}")
    framework = _FRAMEWORKS[source.framework]
    defaults = {**DEFAULTS[source.framework][version], **source.defaults}
    draft = Draft(source.settings, defaults, f"{source.framework} {version}")
    leave_without_counterpart(draft, framework.NO_COUNTERPARTS)
    framework.combine(draft)
    apply_rules(draft, framework.TABLE, framework.PATTERNS)
    if draft.get("run.output_dir") is None:
        draft.put("run.output_dir", f"runs/{name}", note="named after the file")
    missing = [f"{path}: to fill in ({reason})" for path, reason in draft.to_fill_in.items()]
    # A placeholder is a wrong value of its key, which the lines above already name.
    wrong = [problem for problem in config_problems(draft.values) if FILL_IN not in problem]
    # Sections as in the documentation.
    in_order = {name: draft.values[name] for name in Config.model_fields if name in draft.values}
    return PortedConfig(
        stack=source.framework,
        version=version,
        toml=printable_toml(tomli_w.dumps(in_order)),
        rows=draft.rows,
        problems=[*source.problems, *missing, *wrong],
        num_processes=draft.num_processes,
        loss=draft.values.get("loss", {}),
        hub_name=path if _HUB_NAME.fullmatch(path := str(draft.get("model.path"))) else None,
    )
