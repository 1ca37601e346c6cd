"""``megatron-dppo help KEY``: what a key of the configuration means."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``help``."""
    parser.add_argument(
        "key", nargs="?", help="section.key, a section, a key or flag alone, a loss; without it: the sections"
    )


def run_help(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print it.

    Raises:
        ConfigError: nothing is called so.
    """
    from megatron_dppo.config.describe import explain, sections

    key = options.key or (overrides[0] if overrides else None)
    if len(overrides) > (options.key is None):
        raise ConfigError(f"help takes one key, got also {overrides[-1]!r}")
    if key is not None:
        print(explain(key))
        return 0
    for name, model in sections():
        if name:
            print(f"[{name}]  {(model.__doc__ or '').partition(chr(10))[0]}")
    return 0
