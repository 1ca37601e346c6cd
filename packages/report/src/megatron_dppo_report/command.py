"""``megatron-dppo report``: runs as a single HTML file."""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError

HELP = "write one or two runs as an HTML file: curves, masked tokens, responses, findings"
HAS_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("run", type=Path, help="folder of a run (run.output_dir), finished or running")
    parser.add_argument("more_runs", type=Path, nargs="*", metavar="OTHER", help="folders of runs to compare with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="output of diagnose --json, to include it")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="rewrite the report while the run continues, at most this often (default 10)",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the report; with ``--watch``, repeatedly until the run is finished or the command interrupted."""
    from megatron_dppo.report.steps.files import recorded_steps
    from megatron_dppo_report.build import FILE, build, check_target, write_report
    from megatron_dppo_report.reported_run import open_run

    if overrides:
        raise ConfigError(f"unknown argument {overrides[0]!r}; see megatron-dppo report --help")
    if options.watch is not None and not 1 <= options.watch < math.inf:
        raise ConfigError(f"--watch {options.watch:g}: expected a number of seconds, at least 1")
    folders = [options.run, *options.more_runs]
    runs = [open_run(folder) for folder in folders]
    for run in runs:
        if not recorded_steps(run.folder):
            print(
                f"note     {run.folder} has no rollouts: curves only. Fix: in a run, set log.rollouts_every to at "
                "most its number of steps, 1 records each",
                flush=True,
            )
    target = options.output or options.run / FILE
    check_target(target)
    refresh = options.watch or 0.0
    try:
        while True:
            is_last = not refresh or all(_is_finished(folder) for folder in folders)
            # Read before the report is built: a step that is logged meanwhile triggers another report.
            times_before = _modification_times(folders)
            write_report(target, build(runs, ledger=options.ledger, refresh=0 if is_last else refresh))
            print(f"report   {target}", flush=True)
            if is_last:
                return 0
            while _modification_times(folders) == times_before:
                time.sleep(min(refresh, 1.0))
            time.sleep(refresh)
    except KeyboardInterrupt:
        write_report(target, build(runs, ledger=options.ledger))
        return 0


def _modification_times(folders: Sequence[Path]) -> list[int]:
    """Return times that change when a run logs a step or ends."""
    files = [folder / name for folder in folders for name in ("metrics.jsonl", "summary.json")]
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


def _is_finished(folder: Path) -> bool:
    """Return True if the run has ended. The summary of an earlier end is older than the metrics."""
    summary, records = folder / "summary.json", folder / "metrics.jsonl"
    if not (summary.is_file() and records.is_file()):
        return summary.is_file()
    return summary.stat().st_mtime_ns >= records.stat().st_mtime_ns
