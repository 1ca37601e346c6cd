"""Schema of rows, for those of the store and those of other machines."""

from __future__ import annotations

import codecs
import lzma
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_dppo.data.json_values import check_values, parse_object
from megatron_dppo.errors import DataError, UserError
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.statistics import Row

_REWARD = "rollout/reward"
_MAX_PROBLEMS = 3
_EXTERNAL_FIX = "Fix: copy the rows.jsonl (or .xz) of the experiment again, or remove this line"
_STORED_FIX = "Fix: remove this file and rerun the command, which repeats the run"


class _JsonModel(BaseModel):
    """Base of the schema: strict JSON types, finite numbers, unknown keys allowed."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _RunTable(_JsonModel):
    num_steps: int = Field(ge=1)


class _Settings(_JsonModel):
    run: _RunTable


class _Row(_JsonModel):
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
    base_weights: str = ""
    """See ``Store.require_same_bases``. Empty in files before 27 November 2026."""

    @model_validator(mode="after")
    def _has_its_steps(self) -> _Row:
        count = len(self.curves.get(_REWARD, []))
        steps = self.settings.run.num_steps
        if count > steps or (count < steps and not self.error):
            raise ValueError(f"curves has {count} values of {_REWARD}, and settings.run.num_steps is {steps}")
        return self


@dataclass(frozen=True)
class ExternalRow:
    """Row of another machine."""

    location: str
    """File and line, for errors."""
    row: Row

    def check(self, run: GridRun, base: str) -> None:
        """Check that the row belongs to the run."""
        _check_run(self.location, self.row, run, base, _EXTERNAL_FIX)


def read_external_rows(file: Path) -> list[ExternalRow]:
    """Read the rows of a ``rows.jsonl`` or ``rows.jsonl.xz``."""
    try:
        data = file.read_bytes()
        text = lzma.decompress(data) if file.suffix == ".xz" else data
    except (OSError, lzma.LZMAError) as error:
        raise UserError(f"--rows {file}: {error}; expected the rows.jsonl of an experiment, or rows.jsonl.xz") from None
    lines = enumerate(text.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
    locations = ((f"--rows {file}, line {number}", line) for number, line in lines if line.strip())
    return [ExternalRow(location, _parse(location, line, _EXTERNAL_FIX)) for location, line in locations]


def read_stored(file: Path, run: GridRun, base: str) -> Row:
    """Read the row of a run from the store."""
    try:
        line = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). {_STORED_FIX}") from None
    row = _parse(str(file), line, _STORED_FIX)
    _check_run(str(file), row, run, base, _STORED_FIX)
    return row


def relabel_row(row: Row, run: GridRun) -> Row:
    """Return the row with the run's names: the same run may be part of a search and of a report."""
    names = {"phase": run.phase, "candidate": run.candidate, "loss": run.loss, "mismatch": run.mismatch}
    return {**row, **names}


def _parse(location: str, line: bytes, advice: str) -> Row:
    try:
        row = parse_object(location, line)
        _Row.model_validate(row)
        check_values(location, {**row, "curves": list(row["curves"])})
    except DataError as error:
        raise DataError(f"{error}. {advice}") from None
    except ValidationError as error:
        raise DataError(f"{location}: {_format_validation_error(error)}. {advice}") from None
    return row


def _check_run(location: str, row: Row, run: GridRun, base: str, advice: str) -> None:
    expected: Mapping[str, Any] = {"key": run.key, "base": base, "task": run.task, "seed": run.seed}
    for name, value in expected.items():
        if row[name] != value:
            raise DataError(f"{location}: {name} = {reprlib.repr(row[name])}, but this run has {value!r}. {advice}")
    if row["settings"] != run.settings:
        raise DataError(f"{location}: settings are not those of the run {run.key}. {advice}")


def _format_validation_error(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    parts = []
    for detail in details[:_MAX_PROBLEMS]:
        name = ".".join(map(str, detail["loc"]))
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            parts.append(f"{name} is missing")
        elif detail["type"] == "value_error":
            parts.append(f"{name}: {message}" if name else message)
        else:
            parts.append(f"{name} = {reprlib.repr(detail['input']):.80}: {message}")
    return "; ".join(parts) + (f"; and {len(details) - _MAX_PROBLEMS} more" if len(details) > _MAX_PROBLEMS else "")
