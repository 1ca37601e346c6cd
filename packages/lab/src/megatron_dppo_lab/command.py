"""``megatron-dppo experiment NAME``: compare losses under controlled mismatches."""

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError

HELP = "compare losses under controlled mismatches, on small embedded tasks"
HAS_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``experiment``."""
    parser.add_argument("name", help="experiment, such as windtunnel; docs/experiments.md lists them")
    parser.add_argument("--quick", action="store_true", help="run a few losses, mismatches and seeds only")
    parser.add_argument("--output", default="runs/experiments", help="folder of rows, base models, table and figures")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs, one core each")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds (default: the experiment's)")
    parser.add_argument(
        "--limit", type=int, help="stop after this many new runs, 0 only writes the results; rerun to resume"
    )
    parser.add_argument("--rows", nargs="+", default=[], help="rows.jsonl (or .xz) of other machines to import")
    parser.add_argument("--list", action="store_true", help="print the missing runs, run nothing")
    parser.add_argument("--warmup-steps", type=int, help="supervised steps of the base models (default: the task's)")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Execute the missing runs, write table, figures and verdicts, and return 0."""
    from megatron_dppo_lab.named import EXPERIMENTS
    from megatron_dppo_lab.report import Request, execute

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; the settings of an experiment are fixed")
    if options.name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {options.name!r}; expected one of {', '.join(EXPERIMENTS)}")
    for name, least in (("jobs", 1), ("limit", 0), ("warmup_steps", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    _check_seeds(options.seeds or ())
    request = Request(
        output=options.output,
        quick=options.quick,
        jobs=options.jobs,
        seeds=options.seeds,
        limit=options.limit,
        base_steps=options.warmup_steps,
        list_only=options.list,
        rows=options.rows,
    )
    execute(EXPERIMENTS[options.name], request)
    return 0


def _check_seeds(seeds: Sequence[int]) -> None:
    from megatron_dppo.config.run import MAX_SEED

    for index, seed in enumerate(seeds):
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"--seeds {seed}: expected 0 to {MAX_SEED}")
        if seed in seeds[:index]:
            raise ConfigError(f"--seeds {seed} is given twice; expected each seed once")
