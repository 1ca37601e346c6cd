"""Write the tables of docs/results/questions.md from the wind tunnel's third edition.

python tools/write_question_pages.py STORE [--runs RUN ...] [--page FILE]

STORE is the ``--output`` of ``megatron-dppo experiment windtunnel3``. It is only read, also while the command runs.
The text of the page outside its tables stays. Without ``--runs`` so
does the table of masked tokens; each RUN is the folder of a run with ``log.rollouts_every``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.paired import (
    Comparison,
    compare,
    holm,
    without_open_searches,
)
from megatron_dppo_lab.row import relabel_row
from megatron_dppo_lab.statistics import Row, band, masked, mean_reward
from megatron_dppo_lab.store import Rows, Store
from megatron_dppo_lab.third_edition import THIRD_EDITION
from megatron_dppo_lab.third_losses import DELTAS, DRPO_DELTAS

PAGE = Path(__file__).parents[1] / "docs/results/questions.md"
_BINARY = "dppo_binary_tv tuned"
_STALE = "staleness 8"


@dataclass(frozen=True)
class Results:
    """Finished and declared runs of the third edition."""

    rows: Sequence[Row]
    runs: Sequence[GridRun]
    comparisons: Sequence[tuple[Comparison, float]]
    """Every declared comparison with its corrected p-value."""

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the rows of a store.

        Raises:
            UserError: A row is invalid, or there is no such folder.
        """
        if not (folder / "rows").is_dir():
            raise UserError(f"{folder} has no rows; expected the --output of megatron-dppo experiment windtunnel3")
        return cls._of(Store(folder).read)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Results:
        """Return the results of the rows of a ``rows.jsonl``."""
        given = {row["key"]: row for row in rows}
        return cls._of(lambda runs: {run.key: given[run.key] for run in runs if run.key in given})

    @classmethod
    def _of(cls, read: Callable[[Sequence[GridRun]], Rows]) -> Results:
        """Return the results of the rows that ``read`` finds for runs."""
        by_key = Rows()
        runs: list[GridRun] = []
        for stage in THIRD_EDITION.stages(quick=False):
            search = stage.search(quick=False)
            by_key |= read(search)
            report = stage.report(quick=False, seeds=None, rows=by_key.values())
            by_key |= read(report)
            runs += [*search, *report]
        rows = [relabel_row(by_key[run.key], run) for run in runs if run.key in by_key]
        comparisons = compare(THIRD_EDITION.claims, rows, runs)
        corrected = holm([each.p_value for each in comparisons], len(comparisons))
        reported = [run for run in runs if run.phase == "report"]
        return cls(without_open_searches(rows, runs), reported, list(zip(comparisons, corrected, strict=True)))

    def cell(self, task: str, mismatch: str, loss: str) -> list[Row]:
        """Return the finished rows of a cell."""
        wanted = ("report", task, mismatch, loss)
        return [row for row in self.rows if (row["phase"], row["task"], row["mismatch"], row["loss"]) == wanted]

    def seeds(self, task: str, mismatch: str, loss: str) -> int:
        """Return the number of declared seeds of a cell."""
        return len({run.seed for run in self.runs if (run.task, run.mismatch, run.loss) == (task, mismatch, loss)})


def bands_table(results: Results, cells: Iterable[tuple[str, str, str]]) -> str:
    """Return the bands of some cells that are declared, with the masked tokens."""
    lines = ["| condition | loss | mean reward [least, largest] | masked tokens | seeds |", "|---" * 5 + "|"]
    num_open = 0
    for task, mismatch, loss in cells:
        declared = results.seeds(task, mismatch, loss)
        if not declared:
            continue
        rows = results.cell(task, mismatch, loss)
        if not rows:
            num_open += 1
            continue
        rewards, dropped = band(map(mean_reward, rows)), band(map(masked, rows))
        assert rewards is not None and dropped is not None
        mean = f"{rewards.mean:.3f} [{rewards.low:.3f}, {rewards.high:.3f}]"
        finished = f"{len(rows)} of {declared}" if len(rows) < declared else f"{declared}"
        lines.append(f"| {task}, {mismatch} | `{loss}` | {mean} | {dropped.mean:.1%} | {finished} |")
    if num_open:
        lines += ["", f"No run is finished of {num_open} more declared cells."]
    return "\n".join(lines)


def masks_table(folder: Path) -> str:
    """Return what the mask of a recorded run removed, by kind of token and sign of A, and what others would have.

    Raises:
        UserError: The run has no recorded rollouts.
    """
    # Imports torch, which the other tables do without.
    from megatron_dppo.report.steps.files import recorded_steps
    from megatron_dppo.report.steps.tokens import read_tokens
    from megatron_dppo_report.masks import MaskCounts
    from megatron_dppo_report.reported_run import open_run

    run, counts = open_run(folder), MaskCounts()
    for file in recorded_steps(folder).values():
        counts.add(read_tokens(file), run.decode, run.cap, run.other_masks)
    view: Any = counts.view()
    if view is None:
        raise UserError(f"{folder} has no recorded tokens; set log.rollouts_every = 1 in a run")
    lines = [
        f"`{folder.name}`: {view['masked']} of {view['tokens']} tokens masked, {view['gradient']:.1%} of the gradient.",
        "",
        "| tokens | masked, A > 0 | masked, A < 0 |",
        "|---|---|---|",
    ]
    lines += [f"| {kind} | {_share(*counts[:2])} | {_share(*counts[2:])} |" for kind, *counts in view["kinds"]]
    lines += ["", "| age of the token in updates | masked |", "|---|---|"]
    lines += [f"| {age or 'not recorded'} | {_share(*counts)} |" for age, *counts in view["ages"]]
    lines += ["", "| another loss | would have masked | of these, masked here |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {_share(count, view['tokens'])} | {_share(both, count)} |"
        for name, count, both in view["others"]
    ]
    return "\n".join(lines)


def _share(part: int, total: int) -> str:
    return f"{part} of {total} ({part / total:.1%})" if total else "none"


def tables(results: Results) -> dict[str, str]:
    """Return the table of each marker of the page."""
    tasks = list(dict.fromkeys(run.task for run in results.runs))
    mismatches = list(dict.fromkeys(run.mismatch for run in results.runs))
    centered = "dppo_binary_tv centered tuned"
    deltas = [f"dppo_binary_tv {delta}" for delta in DELTAS] + [f"drpo/{delta:g}" for delta in DRPO_DELTAS]
    plain = ("dppo_binary_tv tuned", "grpo tuned", "ipo tuned", "pg_is")
    return {
        "delta-bands": bands_table(results, ((task, _STALE, loss) for task in tasks for loss in deltas)),
        "masked-bands": bands_table(results, ((task, _STALE, loss) for task in tasks for loss in plain)),
        "mismatch-bands": bands_table(
            results,
            ((task, each, loss) for task in tasks for each in mismatches for loss in (_BINARY, centered)),
        ),
    }


def replace_tables(text: str, new: Mapping[str, str]) -> str:
    """Return a page with new tables between its markers ``<!-- table NAME -->`` and ``<!-- end of table -->``.

    Raises:
        UserError: A marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name not in _NAMES:
            raise UserError(f"unknown table {name!r}; expected one of {', '.join(sorted(_NAMES))}")
        return match[0] if name not in new else f"{match[1]}\n{new[name]}\n\n{match[4]}"

    return re.sub(r"(<!-- table ([a-z-]+) -->\n)(.*?)(<!-- end of table -->)", table, text, flags=re.DOTALL)


_NAMES = {"delta-bands", "masked-bands", "masked-tokens", "mismatch-bands"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables of the page."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/results/questions.md.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", default=[])
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    results = Results.read(options.store)
    new = tables(results)
    if options.runs:
        new["masked-tokens"] = "\n\n".join(masks_table(folder) for folder in options.runs)
    text = options.page.read_text(encoding="utf-8")
    options.page.write_text(replace_tables(text, new), encoding="utf-8")
    complete = sum(each.is_complete for each, _ in results.comparisons)
    print(f"{complete} of {len(results.comparisons)} comparisons are complete; {len(results.rows)} rows")


if __name__ == "__main__":
    main()
