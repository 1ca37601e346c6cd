"""``megatron-dppo demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``demo``."""
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of each run (40)")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time, one thread each (3)")
    parser.add_argument("--seed", type=int, default=0, help="0 has its base model in the package; others make theirs")
    parser.add_argument("--output", default="runs/demo", help="folder of picture, sentence and runs (runs/demo)")


def run_demo(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Do three runs and draw them; the exit code is 0.

    Raises:
        UserError: a run ended without a result, or the output folder is not the demo's.
    """
    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; the demo takes --steps, --jobs, --seed and --output")
    for name, least in (("steps", 1), ("jobs", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: expected at least {least}")
    from megatron_dppo.commands.experiments.demo import Demo, carry_out
    from megatron_dppo.config.run import MAX_SEED

    if options.seed > MAX_SEED:
        raise ConfigError(f"--seed {options.seed}: expected at most {MAX_SEED}")

    carry_out(Demo(output=options.output, steps=options.steps, seed=options.seed, jobs=options.jobs))
    return 0
