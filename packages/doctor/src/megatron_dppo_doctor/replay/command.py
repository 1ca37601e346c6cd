"""``megatron-dppo replay``: recompute a recorded step and compare it with the run."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new

HELP = "recompute a recorded step and compare"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay``; unknown arguments are overrides of the run's configuration."""
    parser.add_argument("run", type=Path, help="folder of a run (run.output_dir) with rollouts of the step")
    parser.add_argument("--step", type=int, required=True, help="number of the step in metrics.jsonl")
    parser.add_argument("--verbose", action="store_true", help="list all metrics, not only those that differ most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison as JSON")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Replay a step and print the comparison."""
    require_new(options.json, "--json")
    if options.step < 1:
        raise ConfigError(f"--step {options.step}: expected 1 or more, a step of metrics.jsonl")
    from megatron_dppo_doctor.replay.replay import replay_step

    outcome = replay_step(options.run, options.step, overrides)
    if outcome is not None:
        print(f"\n{outcome.text(verbose=options.verbose)}", flush=True)
        if options.json is not None:
            write_new(options.json, json.dumps(outcome.plain(), indent=2) + "\n")
    return 0
