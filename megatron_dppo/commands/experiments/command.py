"""``megatron-dppo experiment NAME``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``experiment``."""
    parser.add_argument("name", help="which one, as windtunnel; docs/experiments.md lists them")
    parser.add_argument("--quick", action="store_true", help="a few losses, mismatches and seeds")
    parser.add_argument("--output", default="runs/experiments", help="folder of rows, base models, table and figures")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the experiment's")
    parser.add_argument("--limit", type=int, help="stop after so many new runs; the same command goes on")
    parser.add_argument("--rows", nargs="+", default=[], help="rows.jsonl (or .xz) of other machines, to take over")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing; do none, write nothing")
    parser.add_argument("--warmup-steps", type=int, help="of the base models; default: as many as the task needs")


def run_experiment(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Do the missing runs, write table, figures and verdicts; the exit code is 0.

    Raises:
        UserError: no such experiment, an option or a row is wrong, another command works in the folder, or a run ended
            without a result.
    """
    from megatron_dppo.commands.experiments.named import EXPERIMENTS
    from megatron_dppo.commands.experiments.report import Request, carry_out

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; an experiment declares its settings")
    if options.name not in EXPERIMENTS:
        raise ConfigError(f"experiment {options.name!r}; expected one of {', '.join(EXPERIMENTS)}")
    for name in ("jobs", "limit", "warmup_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    _check_seeds(options.seeds or ())
    request = Request(
        output=options.output,
        quick=options.quick,
        jobs=options.jobs,
        seeds=options.seeds,
        limit=options.limit,
        warmup_steps=options.warmup_steps,
        list_only=options.list,
        rows=options.rows,
    )
    carry_out(EXPERIMENTS[options.name], request)
    return 0


def _check_seeds(seeds: Sequence[int]) -> None:
    from megatron_dppo.config.run import MAX_SEED

    for place, seed in enumerate(seeds):
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"--seeds {seed}: expected 0 to {MAX_SEED}")
        if seed in seeds[:place]:
            raise ConfigError(f"--seeds {seed} stands there twice: expected each seed once")
