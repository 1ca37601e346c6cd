"""The long form of test_families: every family on every layout, with tables of the worst errors.

python -m tests.distributed.run_family_matrix OUT.md [--processes 1 2 4] [--families qwen3_next ...] [--folder FOLDER]

FOLDER keeps the errors of each family, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.distributed.families import TINY
from tests.distributed.layouts import describe
from tests.distributed.parity import TOLERANCE, Case, run
from tests.distributed.spawn import run_distributed
from tests.distributed.test_families import EXPERTS, whole_grid

HEAD = """## Families

Each tiny model of docs/models.md on each layout: {versions}.
A cell is the largest of these relative errors against transformers in float64. The bound is {tolerance:.0e}.

- log-probabilities and loss
- the gradient of the worst parameter, and the norm of all gradients
- the worst weight after each of three updates

Written by `python -m tests.distributed.run_family_matrix`, a part of `tools/run_matrix.sh`."""


def layout_name(case: Case) -> str:
    """Return the layout of a case without its model."""
    flags = [f"{key}=false" for key, value in case.parallel.items() if value is False]
    return " ".join([describe(Case(case.parallel, transformer=case.transformer)), *flags])


def errors_by_family(processes: int, families: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the worst error of each family by layout; a family whose report is in the folder is not run."""
    result: dict[str, dict[str, str]] = {}
    for family in families:
        cases = [case for case in whole_grid(processes) if case.family == family]
        report = folder / f"{family}-{processes}"
        if not report.exists():
            run_distributed(run, processes, cases, str(report), timeout=3600.0)
        errors = report.read_text(encoding="utf-8").split()
        result[family] = dict(zip(map(layout_name, cases), errors, strict=True))
        print(processes, family, result[family], flush=True)
    return result


def table(processes: int, layouts: list[str], rows: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of a table: a family in each row, a layout in each column."""
    lines = ["", f"| {processes} process{'es' * (processes > 1)} | " + " | ".join(layouts) + " |"]
    lines.append("|---" * (len(layouts) + 1) + "|")
    lines += [f"| `{name}` | " + " | ".join(row.get(x, "-") for x in layouts) + " |" for name, row in rows.items()]
    return lines


def main() -> None:
    """Run everything and write the tables; ends with an error at the first value out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=sorted(EXPERTS))
    parser.add_argument("--families", nargs="+", default=list(TINY))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    versions = f"Python {sys.version.split()[0]}, torch {version('torch')}, megatron-core {version('megatron-core')}"
    lines = HEAD.format(versions=versions, tolerance=TOLERANCE).splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for processes in arguments.processes:
            rows = errors_by_family(processes, arguments.families, folder)
            lines += table(processes, list(dict.fromkeys(name for row in rows.values() for name in row)), rows)
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
