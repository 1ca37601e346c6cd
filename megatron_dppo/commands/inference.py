"""The weights that ``megatron-dppo eval`` and ``megatron-dppo generate`` use: a run's, or a Hugging Face folder's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.errors import ConfigError
from megatron_dppo.setup.named_functions import OPTION_HELP, SAMPLING, require_permission

if TYPE_CHECKING:
    from megatron_dppo.run.offline import Offline


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the weights."""
    parser.add_argument("target", type=Path, help="TOML configuration file, or the folder of a run (run.output_dir)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="FOLDER", help="use the weights of this Hugging Face folder")
    weights.add_argument("--step", type=int, help="use the run's checkpoint of this step (default: its newest one)")
    parser.add_argument("--run-functions", action="store_true", help=OPTION_HELP)


@contextmanager
def open_weights(options: argparse.Namespace, overrides: Sequence[str], *, is_scored: bool) -> Iterator[Offline]:
    """Open the weights that the arguments name."""
    from megatron_dppo.run.offline import offline_config, open_offline

    is_run = options.target.is_dir()
    if options.step is not None and not is_run:
        raise ConfigError(
            f"--step {options.step} needs the folder of a run, got {str(options.target)!r}. Fix: give run.output_dir"
        )
    config = offline_config(options.target, overrides)
    sections = (*SAMPLING, "reward") if is_scored else SAMPLING
    require_permission(config, sections, options.command, is_given=options.run_functions)
    run = options.target if is_run else None
    with open_offline(config, run=run, model=options.model, step=options.step) as offline:
        yield offline
