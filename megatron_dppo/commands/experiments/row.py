"""What a row must hold, one schema for the rows of the store and for those that other machines made."""

from __future__ import annotations

import codecs
import lzma
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_dppo.commands.experiments.grid import GridRun
from megatron_dppo.commands.experiments.statistics import Row
from megatron_dppo.data.json_values import check_values, parse_object
from megatron_dppo.errors import DataError, UserError

_REWARD = "rollout/reward"
_FEW = 3
"""Problems of one row that are told."""
_HANDED = "Expected the rows.jsonl of an experiment, or rows.jsonl.xz; copy it anew, or take this line out"
_STORED = "Move this file away, and the same command does this run again"


class Part(BaseModel):
    """Types are those of JSON, and numbers are finite; keys of other versions are left alone."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _RunTable(Part):
    num_steps: int = Field(ge=1)


class _Settings(Part):
    run: _RunTable


class _Row(Part):
    key: str
    base: str
    task: str
    loss: str
    mismatch: str
    seed: int = Field(ge=0)
    phase: Literal["search", "report"]
    candidate: int = Field(ge=0)
    settings: _Settings
    error: str
    curves: dict[str, list[float]]
    cpu_seconds: float = Field(ge=0)
    wall_seconds: float = Field(ge=0)

    @model_validator(mode="after")
    def _has_its_steps(self) -> _Row:
        found, steps = len(self.curves.get(_REWARD, [])), self.settings.run.num_steps
        if found > steps or (found < steps and not self.error):
            raise ValueError(f"curves has {found} values of {_REWARD}, and settings.run.num_steps is {steps}")
        return self


@dataclass(frozen=True)
class Handed:
    """A row of another machine."""

    place: str
    """file and line, for messages"""
    row: Row

    def check(self, run: GridRun, base: str) -> None:
        """See ``check_run``."""
        _check_run(self.place, self.row, run, base, _HANDED)


def read_handed(file: Path) -> list[Handed]:
    """The rows of a ``rows.jsonl``, also packed by xz; blank lines are none.

    Raises:
        UserError: the file cannot be read, or a line is no whole row.
    """
    try:
        data = file.read_bytes()
        text = lzma.decompress(data) if file.suffix == ".xz" else data
    except (OSError, lzma.LZMAError) as error:
        raise UserError(f"--rows {file}: {error}; expected the rows.jsonl of an experiment, or rows.jsonl.xz") from None
    lines = enumerate(text.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
    places = ((f"--rows {file}, line {number}", line) for number, line in lines if line.strip())
    return [Handed(place, _parse(place, line, _HANDED)) for place, line in places]


def read_stored(file: Path, run: GridRun, base: str) -> Row:
    """The row of a run in the store.

    Args:
        file: its file.
        run: whose row it must be.
        base: the name of the run's base model.

    Raises:
        UserError: it cannot be read, is no whole row, or that of another run.
    """
    try:
        line = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). {_STORED}") from None
    row = _parse(str(file), line, _STORED)
    _check_run(str(file), row, run, base, _STORED)
    return row


def labelled(row: Row, run: GridRun) -> Row:
    """The row under the names that the run has here: one run may stand in a search and in a report."""
    names = {"phase": run.phase, "candidate": run.candidate, "loss": run.loss, "mismatch": run.mismatch}
    return {**row, **names}


def _parse(place: str, line: bytes, advice: str) -> Row:
    try:
        row = parse_object(place, line)
        _Row.model_validate(row)
        check_values(place, {**row, "curves": list(row["curves"])})
    except DataError as error:
        raise DataError(f"{error}. {advice}") from None
    except ValidationError as error:
        raise DataError(f"{place}: {_told(error)}. {advice}") from None
    return row


def _check_run(place: str, row: Row, run: GridRun, base: str, advice: str) -> None:
    """Check that a whole row is one of this run."""
    wanted: Mapping[str, Any] = {"key": run.key, "base": base, "task": run.task, "seed": run.seed}
    for name, value in wanted.items():
        if row[name] != value:
            raise DataError(f"{place}: {name} = {reprlib.repr(row[name])}, but this run has {value!r}. {advice}")
    if row["settings"] != run.settings:
        raise DataError(f"{place}: settings are not those of the run {run.key}. {advice}")


def _told(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    parts = []
    for detail in details[:_FEW]:
        name, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            parts.append(f"{name} is missing")
        elif detail["type"] == "value_error":
            parts.append(f"{name}: {message}" if name else message)
        else:
            parts.append(f"{name} = {reprlib.repr(detail['input']):.80}: {message}")
    return "; ".join(parts) + (f"; and {len(details) - _FEW} more" if len(details) > _FEW else "")
