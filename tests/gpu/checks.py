"""Reports of checks, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Result:
    """A measured value and the largest one that is right."""

    name: str
    value: float
    bound: float
    error: str = ""
    needs: str = ""
    """Need of the measurement that this machine lacks; such a row is shown, and counted apart."""

    @property
    def passed(self) -> bool:
        """Return True if the value is finite and within its bound."""
        return not self.error and not self.needs and math.isfinite(self.value) and self.value <= self.bound

    @property
    def failed(self) -> bool:
        """Return True if it was measured, or should have been, and is not right."""
        return not self.passed and not self.needs


def not_run(name: str, needs: str) -> Result:
    """A row that this machine cannot have."""
    return Result(name, math.nan, math.nan, needs=needs)


Check = Callable[[torch.device], Iterable[Result]]


def run_check(group: str, check: Check, device: torch.device, bound_scale: float = 1.0) -> list[Result]:
    """The results of one group; an exception is a failed result, never a silent skip.

    ``bound_scale`` multiplies the bounds: with 0 every check that is not exact must fail, which tests the script.
    """
    results: list[Result] = []
    try:
        results.extend(check(device))
    except Exception as error:
        results.append(Result("stopped", math.nan, 0.0, f"{type(error).__name__}: {error}"))
    if not results:
        results.append(Result("nothing was checked", math.nan, 0.0, "the group reported no result"))
    return [Result(f"{group}: {r.name}", r.value, bound_scale * r.bound, r.error, r.needs) for r in results]


def _rows(results: Iterable[Result]) -> list[tuple[str, str, str, str]]:
    rows = [("check", "value", "bound", "verdict")]
    for r in results:
        verdict = "ok" if r.passed else f"NOT RUN: needs {r.needs}" if r.needs else f"FAILED {r.error}".rstrip()
        numbers = ("-", "-") if r.needs else (f"{r.value:.2e}", f"{r.bound:.1e}")
        rows.append((r.name, *numbers, verdict))
    return rows


def markdown(results: Iterable[Result], machine: Iterable[str]) -> str:
    """A page to commit: the machine, and a table of the results."""
    head, *body = _rows(results)
    lines = [head, ("---",) * len(head), *body]
    # A cell may quote an error of several lines, or a pipe.
    cells = [[cell.replace("\n", " ").replace("|", "\\|") for cell in line] for line in lines]
    table_lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join(["# tests/gpu/run_all.sh", "", *(f"- {line}" for line in machine), "", *table_lines, ""])


def table(results: Iterable[Result]) -> str:
    """One line a result."""
    rows = _rows(results)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
