"""Grid of runs: losses x mismatches x tasks x seeds, each run an ordinary configuration."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from megatron_dppo.config.io import validate
from megatron_dppo.config.paths import merge_tables
from megatron_dppo.errors import ConfigError

Settings = Mapping[str, Any]
"""Nested tables as in a TOML file."""


@dataclass(frozen=True)
class LossSetting:
    """Loss of the grid: a row of the table."""

    name: str
    table: Settings
    candidates: Sequence[Settings] = ()
    """Settings that the search tries on top. Empty disables the search."""


@dataclass(frozen=True)
class Mismatch:
    """Mismatch of engine and trainer at one level: a column of the table."""

    name: str
    level: str
    settings: Settings

    @property
    def label(self) -> str:
        """Name and level together."""
        return f"{self.name} {self.level}".strip()


@dataclass(frozen=True)
class GridRun:
    """One run of the trainer."""

    task: str
    loss: str
    mismatch: str
    seed: int
    settings: Settings = field(repr=False)
    """Configuration without the paths of base model and output."""
    phase: str = "report"
    """``report``, or ``search`` for trials on seeds without reported results."""
    candidate: int = 0

    @cached_property
    def key(self) -> str:
        """Hash of everything that the result depends on."""
        # The empty string is part of the keys of all recorded rows.
        text = json.dumps([self.task, self.seed, self.settings, ""], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def weights(self) -> str:
        """Format to which the engine's weights are rounded, or ``none``."""
        return str(self.settings["rollout"].get("perturbation", {}).get("weights", "none"))

    @cached_property
    def refusal(self) -> str:
        """Error of an invalid configuration. Empty for a valid one."""
        try:
            validate(merged(self.settings, PLACEHOLDER_PATHS), self.key)
        except ConfigError as error:
            return str(error).partition("\n")[2].strip(" -")
        return ""


PLACEHOLDER_PATHS: Settings = {"run": {"output_dir": "run"}, "model": {"path": "base"}}
"""Paths for validation. The real ones are set when a run starts."""


def merged(*tables: Settings) -> dict[str, Any]:
    """Merge nested tables. Later values win."""
    return copy.deepcopy(reduce(merge_tables, map(dict, tables), {}))


def run_settings(
    base: Settings, loss: LossSetting, mismatch: Mismatch, seed: int, chosen: Settings | None = None
) -> Settings:
    """Return the configuration of a run: settings of task, mismatch, loss, and of the search."""
    seeded = {"run": {"seed": seed}, "loss": dict(loss.table)}
    return merged(base, mismatch.settings, seeded, chosen or {})
