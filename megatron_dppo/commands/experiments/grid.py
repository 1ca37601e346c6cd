"""A declared grid of runs: losses x mismatches x tasks x seeds, each run an ordinary configuration."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_dppo.config.io import validate
from megatron_dppo.errors import ConfigError

Settings = Mapping[str, Any]
"""Nested tables, as those of a TOML file."""


@dataclass(frozen=True)
class LossSetting:
    """A row of the table."""

    name: str
    table: Settings
    """the ``[loss]`` section"""
    candidates: Sequence[Settings] = ()
    """settings among which the search chooses, over those above; none = nothing is searched"""


@dataclass(frozen=True)
class Mismatch:
    """A column of the table: a difference of engine and trainer at one level."""

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
    """all but where it reads the base model and where it writes"""
    phase: str = "report"
    """``search``: settings are tried on seeds that no result is reported of"""
    candidate: int = 0
    """which one of the loss's candidates"""

    @cached_property
    def key(self) -> str:
        """Names the run by all that its result depends on."""
        # The empty string is part of the keys of all recorded rows.
        text = json.dumps([self.task, self.seed, self.settings, ""], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def weights(self) -> str:
        """What the engine's weights are rounded to, or ``none``."""
        return str(self.settings["rollout"].get("perturbation", {}).get("weights", "none"))

    @cached_property
    def refusal(self) -> str:
        """Why the configuration is refused; empty = it is not."""
        try:
            validate(merged(self.settings, PLACES), self.key)
        except ConfigError as error:
            return str(error).partition("\n")[2].strip(" -")
        return ""


PLACES: Settings = {"run": {"output_dir": "run"}, "model": {"path": "base"}}
"""What a run is given when it starts."""


def merged(*tables: Settings) -> dict[str, Any]:
    """Nested tables over one another; later values win."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            before = result.get(key)
            both = isinstance(value, Mapping) and isinstance(before, dict)
            result[key] = merged(before or {}, value) if both else copy.deepcopy(value)
    return result


def run_settings(
    base: Settings, loss: LossSetting, mismatch: Mismatch, seed: int, chosen: Settings | None = None
) -> Settings:
    """The configuration of one run: the task's settings, the mismatch, the loss and what the search chose for it."""
    seeded = {"run": {"seed": seed}, "loss": dict(loss.table)}
    return merged(base, mismatch.settings, seeded, chosen or {})
