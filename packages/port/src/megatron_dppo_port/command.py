"""``megatron-dppo port FILE``: translate a run of verl, slime or prime-rl into a configuration of this package."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new
from megatron_dppo.report.printable import printable_line

if TYPE_CHECKING:
    from megatron_dppo_port.port import PortedConfig

HELP = "translate a launch script or configuration of verl, slime or prime-rl"
HAS_OVERRIDES = False

_LISTED_WITH_VERBOSE = ("ported", "default")
_DPPO_KEYS = ("divergence_threshold_low", "divergence_threshold_high", "ratio_cap", "form", "aggregation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``port``."""
    parser.add_argument("file", type=Path, help="launch script (.sh) of verl or slime, verl's .yaml, prime-rl's .toml")
    parser.add_argument("--output", type=Path, help="write the TOML there (default: standard output)")
    parser.add_argument(
        "--framework-version", metavar="VERSION", help="version whose defaults apply (default: the newest release)"
    )
    parser.add_argument(
        "--root",
        type=Path,
        help="folder inside which sourced files and hydra's configurations are read (default: that of the file)",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable that the script expects from its environment; may be repeated",
    )
    parser.add_argument("--verbose", action="store_true", help="also list the settings that were ported unchanged")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the TOML, and to standard error the status of each setting.

    Return 1 if the configuration is incomplete or invalid.
    """
    from megatron_dppo_port.budget import call_limited
    from megatron_dppo_port.port import port

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; give overrides to train instead")
    require_new(options.output, "--output")
    variables = dict(_split_variable(text) for text in options.variable)
    ported = call_limited(
        lambda: port(options.file, version=options.framework_version, root=options.root, variables=variables)
    )
    _print_rows(ported, options.verbose)
    name = f"{ported.stack} {ported.version}"
    # Names and texts of the file must not end a comment or control the terminal.
    problems = [printable_line(problem) for problem in ported.problems]
    header = f"# Ported from {printable_line(options.file.name)} by megatron-dppo port, with the defaults of {name}.\n"
    header += "".join(f"# To do: {problem}\n" for problem in problems) + "\n"
    if options.output is None:
        print(header + ported.toml)
    else:
        write_new(options.output, header + ported.toml)
    for problem in problems:
        print(f"  missing or wrong: {problem}", file=sys.stderr)
    size = ported.num_processes or "TO_FILL_IN"
    target = options.output or "my.toml"
    print(f"\ndefaults: {name} (--framework-version selects another)", file=sys.stderr)
    if ported.hub_name:
        # A relative path counts from the folder of the TOML file.
        folder = shlex.quote(str(Path(target).parent / ported.hub_name))
        print(f"next: hf download {ported.hub_name} --local-dir {folder}", file=sys.stderr)
    print(f"next: megatron-dppo train {target} --dry-run --world-size {size}", file=sys.stderr)
    print(printable_line(_loss_advice(ported)), file=sys.stderr)
    return 1 if problems else 0


def _loss_advice(ported: PortedConfig) -> str:
    """Return how the loss differs from DPPO with the values of this package."""
    from megatron_dppo.config.loss_aliases import LOSS_ALIASES

    name = str(ported.loss.get("name"))
    same = str(LOSS_ALIASES.get(name, {}).get("name", name))
    if not same.startswith("dppo_"):
        return f'[loss] is that of {ported.stack}. To use DPPO, set name = "dppo_binary_tv" there.'
    values = ", ".join(f"{key} = {ported.loss[key]}" for key in _DPPO_KEYS if key in ported.loss)
    return f'[loss] is DPPO ({same}) with {values}. For the values of this package, keep name = "{same}" alone there.'


def _split_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--variable {text!r}: expected NAME=VALUE")
    return name, value


def _print_rows(ported: PortedConfig, is_verbose: bool) -> None:
    from megatron_dppo_port.draft import Status

    for status in get_args(Status):
        rows = [row for row in ported.rows if row.status == status]
        if not rows:
            continue
        is_listed = status not in _LISTED_WITH_VERBOSE or is_verbose
        print(f"\n{status} ({len(rows)})" + ("" if is_listed else "; --verbose lists them"), file=sys.stderr)
        for row in rows if is_listed else ():
            source = f"{row.source_key} = {row.value}" if row.source_key else "(not in the file)"
            print(f"  {printable_line(source[:70]):<70}  {printable_line(row.target)}", file=sys.stderr)
