"""``megatron-dppo train CONFIG``: post-train a model."""

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_open_files

HELP = "post-train a model with a configuration file"
HAS_OVERRIDES = True

_LOST_PEER_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo after another rank exited. The cause is in that rank's output or its launcher's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--dry-run", action="store_true", help="run all checks, print layout and batch sizes, stop")
    parser.add_argument(
        "--world-size",
        type=int,
        help="with --dry-run: number of processes (default: WORLD_SIZE, or the smallest that fits the layout)",
    )
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: also print the resolved configuration")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Load the configuration, then train or, with ``--dry-run``, report everything that would stop the run."""
    from megatron_dppo.commands.dry_run import dry_run
    from megatron_dppo.config.io import invalid_config, read_config

    require_open_files()
    if options.world_size is not None and not options.dry_run:
        raise ConfigError(
            f"--world-size {options.world_size} needs --dry-run. Fix: remove it; torchrun or srun sets the number "
            "of processes of a run"
        )
    # The only command that reads a configuration to train with it; a dry run scores an answer.
    loaded = read_config(options.config, overrides, with_functions=True)
    if options.dry_run:
        return dry_run(options.config, loaded, options.world_size, verbose=options.verbose)
    if loaded.problems or loaded.config is None:
        raise invalid_config(options.config, loaded.problems)
    from megatron_dppo.run import loop

    try:
        return loop.run(loaded.config)
    except RuntimeError as error:
        if not any(text in str(error) for text in _LOST_PEER_MESSAGES):
            raise
        rank = os.environ.get("RANK", "0")
        print(f"[rank {rank}] stops because another rank exited; see that rank's error", file=sys.stderr, flush=True)
        return 1
