"""``megatron-dppo help KEY``: explanation of a key of the configuration."""

import argparse
from collections.abc import Sequence

from megatron_dppo.errors import ConfigError

HELP = "explain a key of the configuration"
HAS_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``help``."""
    parser.add_argument(
        "key", nargs="?", help="section.key, a section, a bare key or flag, or a loss (default: list the sections)"
    )
    parser.add_argument("--verbose", action="store_true", help="describe every key of a long section")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the explanation of a key, or the list of sections."""
    from megatron_dppo.config.describe import explain, sections
    from megatron_dppo.report.records import RENAMED_METRICS

    # `help --lr` arrives as an override, since argparse does not know the flag.
    key = options.key or (overrides[0] if overrides else None)
    num_expected = 1 if options.key is None else 0
    if len(overrides) > num_expected:
        raise ConfigError(f"Expected one key, also got {overrides[-1]!r}. Fix: run `megatron-dppo help` once per key")
    if key is not None:
        renamed = RENAMED_METRICS.get(key)
        print(
            explain(key, verbose=options.verbose)
            if renamed is None
            else f"{key}: in older runs, the metric {renamed} (docs/metrics.md)"
        )
        return 0
    for name, model in sections():
        if name:
            first_line = (model.__doc__ or "").partition("\n")[0]
            print(f"[{name}]  {first_line}")
    return 0
