"""The long form of test_objective: up to 8 processes, with a table of the errors.

python -m tests.distributed.run_matrix OUT.md [--processes 1 2 4 8]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from tests.distributed.layouts import LAYOUTS, LINEAR_LAYOUTS, describe
from tests.distributed.objective import TOLERANCE, VARIANTS, run, write_references
from tests.distributed.spawn import run_distributed


def main() -> None:
    """Run everything and write the table; ends with an error at the first value out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=sorted(LAYOUTS))
    arguments = parser.parse_args()
    rows = []
    layouts = {n: cases + LINEAR_LAYOUTS.get(n, []) for n, cases in LAYOUTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        every_model = [(case, list(VARIANTS)) for processes in arguments.processes for case in layouts[processes]]
        references = write_references(Path(folder), every_model)
        report = Path(folder) / "report"
        for processes in arguments.processes:
            for case in layouts[processes]:
                report.unlink(missing_ok=True)
                start = time.monotonic()
                run_distributed(run, processes, [(case, list(VARIANTS))], references, str(report), timeout=1800.0)
                errors: dict[str, float] = defaultdict(float)
                for line in report.read_text(encoding="utf-8").splitlines():
                    _, variant, gradient, loss = line.split(" | ")
                    errors[variant] = max(errors[variant], float(gradient))
                    errors["loss"] = max(errors["loss"], float(loss))
                loss_error = errors.pop("loss")
                worst = max(errors, key=lambda name: errors[name])
                row = f"| {processes} | {describe(case)} | {errors[worst]:.1e} ({worst}) | {loss_error:.1e} |"
                rows.append(row)
                print(row, f"{time.monotonic() - start:.0f} s", flush=True)
    versions = f"Python {sys.version.split()[0]}, torch {version('torch')}, megatron-core {version('megatron-core')}"
    head = [
        f"## {versions}",
        "",
        f"{len(VARIANTS)} variants on each layout, bound {TOLERANCE:.0e}.",
        "",
        "| processes | layout | gradient of the worst parameter | loss |",
        "|---|---|---|---|",
    ]
    arguments.out.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
