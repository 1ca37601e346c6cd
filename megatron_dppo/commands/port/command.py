"""``megatron-dppo port FILE``: translate a run of verl, slime or prime-rl into a configuration of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new


def add_port_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``port``."""
    parser.add_argument("file", type=Path, help="launch script (.sh) of verl or slime, verl's .yaml, prime-rl's .toml")
    parser.add_argument("--output", type=Path, help="write the TOML there (default: standard output)")
    parser.add_argument("--verbose", action="store_true", help="also list the settings that were ported unchanged")


def run_port(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the TOML, and to standard error the status of each setting.

    Returns:
        0, or 1 if the configuration is incomplete or invalid.

    Raises:
        ConfigError: The file cannot be read, or the output exists.
    """
    from megatron_dppo.commands.port.draft import Status
    from megatron_dppo.commands.port.port import port

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; give overrides to train instead")
    require_new(options.output, "--output")
    try:
        ported = port(options.file)
    except RecursionError as error:
        raise ConfigError(
            f"{str(options.file)!r} is nested too deeply for a launch script; give the script itself"
        ) from error
    for status in get_args(Status):
        rows = [row for row in ported.rows if row.status == status]
        if not rows:
            continue
        is_listed = status != "ported" or options.verbose
        print(f"\n{status} ({len(rows)})" + ("" if is_listed else "; --verbose lists them"), file=sys.stderr)
        for row in rows if is_listed else ():
            source = f"{row.source_key} = {row.value}" if row.source_key else "(not in the file)"
            print(f"  {source[:70]:<70}  {row.target}", file=sys.stderr)
    header = f"# Ported from {ported.stack}'s {options.file.name} by megatron-dppo port.\n\n"
    if options.output is None:
        print(header + ported.toml)
    else:
        write_new(options.output, header + ported.toml)
    for problem in ported.problems:
        print(f"  missing or wrong: {problem}", file=sys.stderr)
    name = options.output or "my.toml"
    size = f" --world-size {ported.num_processes}" if ported.num_processes else ""
    print(f"\nnext: megatron-dppo train {name} --dry-run{size}", file=sys.stderr)
    print(f'[loss] is that of {ported.stack}. To use DPPO, set name = "dppo_binary_tv" there.', file=sys.stderr)
    return 1 if ported.problems else 0
