"""``megatron-dppo report``: a run, or two, as one HTML file."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megatron_dppo.report.page.build import ReportedRun
    from megatron_dppo.report.steps.tokens import Decode


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``report``."""
    parser.add_argument("run", type=Path, help="folder of a run (run.output_dir), which may be running")
    parser.add_argument("second", type=Path, nargs="?", help="another one, to compare with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where it is written (default: RUN/report.html)")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="what diagnose --json wrote, to show it too")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=10.0, metavar="SECONDS", help="write it again while the run goes"
    )


def run_report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the report; with ``--watch`` until the run is finished, or an interrupt.

    Raises:
        UserError: there is no such run, or the file cannot be written.
    """
    from megatron_dppo.report.page.build import FILE, build, check_target, write_report

    if overrides:
        raise ConfigError(f"unknown argument {overrides[0]!r}; see megatron-dppo report --help")
    if options.watch is not None and not 1 <= options.watch < math.inf:
        raise ConfigError(f"--watch {options.watch:g}: expected a number of seconds, at least 1")
    folders = [options.run, *([options.second] if options.second else [])]
    runs, target = [_opened(folder) for folder in folders], options.output or options.run / FILE
    check_target(target)
    refresh = options.watch or 0.0
    try:
        while True:
            is_over = not refresh or all(_is_finished(folder) for folder in folders)
            before = _stamp(folders)
            write_report(target, build(runs, ledger=options.ledger, refresh=0 if is_over else refresh))
            print(f"report   {target}", flush=True)
            if is_over:
                return 0
            while _stamp(folders) == before:
                time.sleep(min(refresh, 1.0))
            time.sleep(refresh)
    except KeyboardInterrupt:
        write_report(target, build(runs, ledger=options.ledger))
        return 0


def _stamp(folders: Sequence[Path]) -> list[int]:
    """Changes when a run has logged a step, or ended."""
    files = [folder / name for folder in folders for name in ("metrics.jsonl", "summary.json")]
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


def _is_finished(folder: Path) -> bool:
    """A summary is written at the end, and one of an earlier end is older than the records."""
    summary, records = folder / "summary.json", folder / "metrics.jsonl"
    if not (summary.is_file() and records.is_file()):
        return summary.is_file()
    return summary.stat().st_mtime_ns >= records.stat().st_mtime_ns


def _opened(folder: Path) -> ReportedRun:
    from megatron_dppo.report.page.build import ReportedRun

    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; expected the folder of a run (run.output_dir)")
    return ReportedRun(folder, _decoder(folder))


def _decoder(folder: Path) -> Decode | None:
    """Texts of tokens by the run's tokenizer; None, and a note, when it is not there."""
    from megatron_dppo.data.chat import load_tokenizer, token_texts
    from megatron_dppo.report.steps.files import recorded_steps
    from megatron_dppo.run.starts import load_run_config

    if not recorded_steps(folder):
        print(f"note     {folder} has no rollouts: curves only (log.rollouts_every = 1 writes them)", flush=True)
        return None
    try:
        tokenizer = load_tokenizer(load_run_config(folder, []).model.path)
    except UserError as error:
        print(f"note     tokens are shown by their ids: {error}", flush=True)
        return None
    return lambda ids: token_texts(tokenizer, ids)
