"""``megatron-dppo restarts EVENT CONFIG``: decide for a launch script whether to requeue its job."""

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError

HELP = "for launch scripts: decide whether to requeue a job"
HAS_OVERRIDES = True

_TAIL_LINES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``restarts``; unknown arguments are overrides of the configuration."""
    parser.add_argument(
        "event",
        choices=["begin", "crashed", "stopped", "preempted"],
        help="event of this attempt: it begins, crashed, was stopped before its time limit, or was preempted",
    )
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--record", type=Path, required=True, help="file that counts the attempts, one for each job")
    parser.add_argument(
        "--max-restarts",
        type=int,
        required=True,
        metavar="N",
        help="restarts after crashes without a newer checkpoint",
    )
    parser.add_argument("--exit-code", type=int, default=1, help="crashed: exit code of the trainer (default 1)")
    parser.add_argument("--logs", type=Path, help="crashed: folder with code_RANK and rank_RANK.log of the ranks")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Count an attempt. Return 0 to continue or requeue the job, otherwise the exit code with which it ends."""
    from megatron_dppo.config.io import load_config
    from megatron_dppo.process.restarts import FINAL, AttemptsExhausted, RankExit, Restarts, find_first_failure

    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts}: expected 0 (never) or more")
    output_dir = Path(load_config(options.config, overrides).run.output_dir)
    restarts = Restarts(options.record, output_dir, options.max_restarts)
    if options.event == "begin":
        _log(restarts.begin())
    elif options.event == "stopped":
        _log(restarts.stopped())
    elif options.event == "preempted":
        restarts.preempted()
    else:
        end = (
            RankExit(options.exit_code) if options.logs is None else find_first_failure(options.logs, options.exit_code)
        )
        where = "" if options.logs is None else f" (logs: {options.logs})"
        how = f"has crashed with exit code {end.code}{'' if end.rank is None else f' of rank {end.rank}'}{where}"
        # Rank 0's output is in the job's log already.
        if options.logs is not None and end.rank:
            _print_tail(options.logs / f"rank_{end.rank}.log")
        if end.code in FINAL:
            _log(f"the trainer exited with code {end.code}: a restart would fail in the same way. Fix: see its message")
            return end.code
        try:
            _log(restarts.crashed(how))
        except AttemptsExhausted as error:
            _log(str(error))
            return end.code
    return 0


def _print_tail(log: Path) -> None:
    """Print the last lines of a rank's own log: the job's log has only the output of rank 0."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            last = deque(file, maxlen=_TAIL_LINES)
    except OSError:
        return
    _log(f"last lines of {log}:")
    for line in last:
        print(f"  | {line.rstrip()}", flush=True)


def _log(text: str) -> None:
    if text:
        print(f"launch: {text}", flush=True)
