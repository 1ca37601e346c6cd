"""``megatron-dppo port FILE``: a run of verl, slime or prime-rl as a configuration of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new


def add_port_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``port``."""
    parser.add_argument("file", type=Path, help="launch script (.sh) of verl or slime, verl's .yaml, prime-rl's .toml")
    parser.add_argument("--output", type=Path, help="write the TOML there; without it, to standard output")


def run_port(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the TOML, and to standard error a table of what became of each setting; 1 when something is missing.

    Raises:
        ConfigError: the file cannot be read, or the output exists.
    """
    from megatron_dppo.commands.port.port import port

    if overrides:
        raise ConfigError(f"port takes no {overrides[0]!r}; put what differs on the command line of train")
    require_new(options.output, "--output")
    try:
        found = port(options.file)
    except RecursionError as error:
        raise ConfigError(f"{str(options.file)!r} is nested too deeply to be a launch; give the file itself") from error
    for status in ("taken", "changed", "unread", "no home"):
        rows = [row for row in found.rows if row.status == status]
        print(f"\n{status} ({len(rows)})" if rows else "", file=sys.stderr)
        for row in rows:
            theirs = f"{row.theirs} = {row.value}" if row.theirs else "(not in the file)"
            print(f"  {theirs[:70]:<70}  {row.ours}", file=sys.stderr)
    size = f" --world-size {found.num_processes}" if found.num_processes else ""
    head = f"# Ported from {found.stack}'s {options.file.name} by megatron-dppo port.\n\n"
    if options.output is None:
        print(head + found.toml)
    else:
        write_new(options.output, head + found.toml)
    for problem in found.problems:
        print(f"  missing or wrong: {problem}", file=sys.stderr)
    name = options.output or "my.toml"
    print(f"\nnext: megatron-dppo train {name} --dry-run{size}", file=sys.stderr)
    print('[loss] is theirs; for DPPO put name = "dppo_binary_tv" there in its place', file=sys.stderr)
    return 1 if found.problems else 0
