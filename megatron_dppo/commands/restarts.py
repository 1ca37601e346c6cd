"""``megatron-dppo restarts EVENT CONFIG``: for launch scripts, whether a job is to be queued again."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError

_TAIL_LINES = 30


def add_restarts_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``restarts``; all others are overrides of the configuration."""
    parser.add_argument(
        "event",
        choices=["begin", "crashed", "stopped", "preempted"],
        help="what happens to this try of the job: it begins, it has crashed, it was stopped before its time limit, it "
        "was preempted",
    )
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--record", type=Path, required=True, help="file with the count of tries, one for each job")
    parser.add_argument(
        "--max-restarts", type=int, required=True, metavar="N", help="tries after a crash without a newer checkpoint"
    )
    parser.add_argument("--exit-code", type=int, default=1, help="crashed: of the trainer's step (default 1)")
    parser.add_argument("--logs", type=Path, help="crashed: folder with code_RANK and rank_RANK.log of the ranks")


def run_restarts(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Count a try: 0 = go on, or queue the job again; otherwise the code that the job is to end with.

    Raises:
        UserError: a wrong configuration, a damaged record, no more tries.
    """
    from megatron_dppo.config.io import load_config
    from megatron_dppo.run.restarts import FINAL, RankEnd, Restarts, TriesUsedUp, how_it_ended

    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts}: expected 0 (never) or more")
    output_dir = Path(load_config(options.config, overrides).run.output_dir)
    restarts = Restarts(options.record, output_dir, options.max_restarts)
    if options.event == "begin":
        _say(restarts.begin())
    elif options.event == "stopped":
        _say(restarts.stopped())
    elif options.event == "preempted":
        restarts.preempted()
    else:
        end = RankEnd(options.exit_code) if options.logs is None else how_it_ended(options.logs, options.exit_code)
        where = "" if options.logs is None else f" (logs: {options.logs})"
        how = f"has crashed with exit code {end.code}{'' if end.rank is None else f' of rank {end.rank}'}{where}"
        if options.logs is not None and end.rank:
            _show_end(options.logs / f"rank_{end.rank}.log")
        if end.code in FINAL:
            _say(
                f"the trainer has ended with exit code {end.code}, which another try would not change; see its message"
            )
            return end.code
        try:
            _say(restarts.crashed(how))
        except TriesUsedUp as error:
            _say(str(error))
            return end.code
    return 0


def _show_end(log: Path) -> None:
    """The last lines of a rank's own log: in the job's file is only what rank 0 prints."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            last = deque(file, maxlen=_TAIL_LINES)
    except OSError:
        return
    _say(f"the end of {log}:")
    for line in last:
        print(f"  | {line.rstrip()}", flush=True)


def _say(text: str) -> None:
    if text:
        print(f"launch: {text}", flush=True)
