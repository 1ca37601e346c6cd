"""``megatron-dppo demo``: compare three losses in minutes on a CPU."""

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError

HELP = "DPPO, ratio clipping and no trust region side by side, in minutes on a CPU"
HAS_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``demo``."""
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of each run (default 40)")
    parser.add_argument("--jobs", type=int, default=3, help="concurrent runs, one thread each (default 3)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed; the package has the base model of seed 0, others are trained first"
    )
    parser.add_argument(
        "--output", default="runs/demo", help="folder of picture, sentence and runs (default runs/demo)"
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Execute three runs, draw them and return 0."""
    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; the demo takes --steps, --jobs, --seed and --output")
    for name, least in (("steps", 1), ("jobs", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: expected at least {least}")
    from megatron_dppo.config.run import MAX_SEED
    from megatron_dppo_lab.demo import Demo, execute

    if options.seed > MAX_SEED:
        raise ConfigError(f"--seed {options.seed}: expected at most {MAX_SEED}")

    execute(Demo(output=options.output, steps=options.steps, seed=options.seed, jobs=options.jobs))
    return 0
