"""``megatron-dppo base``: make the base model that runs of an embedded task start from."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.commands.extras import require_extra
from megatron_dppo.errors import ConfigError

HELP = "make a small base model by supervised training on an embedded task or a file"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``base``."""
    parser.add_argument("source", help="embedded task (task:chain_sum), or a file whose rows have prompt and response")
    parser.add_argument("folder", type=Path, help="Hugging Face folder to create")
    parser.add_argument("--steps", type=int, help="supervised updates (default: the task's number, or 1600)")
    parser.add_argument("--batch-size", type=int, help="pairs of prompt and response per update (default: as above)")
    parser.add_argument("--seed", type=int, help="seed of initial weights and samples (default 0)")
    parser.add_argument("--processes", type=int, default=1, help="training processes on this machine (default 1)")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train the model and return 0, or the exit code of the training processes.

    Raises:
        UserError: An unknown source, an existing folder, or settings that do not fit together.
    """
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: expected at least 1")
    if os.path.lexists(options.folder):
        raise ConfigError(f"{options.folder} already exists. Fix: name another folder, or move this one away")
    require_extra("base")
    from megatron_dppo_lab.base_model import create_base

    flags = (
        ("run.num_steps", options.steps),
        ("rollout.prompts_per_step", options.batch_size),
        ("run.seed", options.seed),
    )
    chosen = [f"--{key}={value}" for key, value in flags if value is not None]
    return create_base(options.source, options.folder, [*chosen, *overrides], options.processes)
