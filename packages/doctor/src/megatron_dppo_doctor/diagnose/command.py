"""``megatron-dppo diagnose``: attribute the mismatch between engine and trainer to its causes."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new
from megatron_dppo.setup.named_functions import OPTION_HELP

if TYPE_CHECKING:
    from megatron_dppo_doctor.diagnose.ledger import Ledger

HELP = "attribute |log pi - log mu| of a run to its causes"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diagnose``; unknown arguments are overrides of the run's configuration."""
    parser.add_argument("run", nargs="?", help="folder of a stopped run (run.output_dir)")
    parser.add_argument("--rollouts", metavar="FILE", help="diagnose rollouts of verl, slime or TRL instead of a run")
    parser.add_argument("--model", metavar="FOLDER", help="with --rollouts: Hugging Face folder of the trained weights")
    parser.add_argument("--limit", type=int, help="with --rollouts: number of responses to read (default: all)")
    parser.add_argument("--temperature", type=float, help="with --rollouts: sampling temperature (default 1)")
    parser.add_argument("--top-p", type=float, help="with --rollouts: sampling filter (default: none)")
    parser.add_argument("--top-k", type=int, help="with --rollouts: sampling filter (default: none)")
    parser.add_argument("--min-p", type=float, help="with --rollouts: sampling filter (default: none)")
    parser.add_argument("--run-functions", action="store_true", help=OPTION_HELP)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ledger as JSON to a new file")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the ledger. Return 1 if more than 5 % of the mismatch is unexplained, else 0."""
    from megatron_dppo_doctor.diagnose.ledger import format_ledger

    if (options.run is None) == (options.rollouts is None):
        raise ConfigError("Expected either the folder of a run, or --rollouts FILE with --model FOLDER")
    require_new(options.json, "--json")
    ledger = _diagnose_run(options, overrides) if options.rollouts is None else _diagnose_rollouts(options, overrides)
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{format_ledger(ledger)}", flush=True)
        if options.json is not None:
            write_new(options.json, json.dumps(ledger.to_json(), indent=2) + "\n")
    return 1 if ledger.closes is False else 0


def _diagnose_run(options: argparse.Namespace, overrides: Sequence[str]) -> Ledger:
    from megatron_dppo_doctor.diagnose.run import diagnose_run

    if given := [name for name in (*_ROLLOUT_OPTIONS, "model") if getattr(options, name) is not None]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} needs --rollouts. Fix: remove it; a run has its own configuration"
        )
    return diagnose_run(Path(options.run), overrides, with_functions=options.run_functions)


def _diagnose_rollouts(options: argparse.Namespace, overrides: Sequence[str]) -> Ledger:
    from megatron_dppo.types import SamplingParams
    from megatron_dppo_doctor.diagnose.foreign import diagnose_rollouts

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}: --rollouts has no configuration to override")
    if options.model is None:
        raise ConfigError("--rollouts needs --model FOLDER, the Hugging Face folder of the trained weights")
    given = {name: getattr(options, name) for name in _ROLLOUT_OPTIONS if getattr(options, name) is not None}
    for name, value in given.items():
        is_allowed, expected = _ROLLOUT_OPTIONS[name]
        if not is_allowed(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {expected}")
    limit = given.pop("limit", None)
    # Nothing is sampled: the number of new tokens is not read.
    declared = SamplingParams(max_new_tokens=1, **given)
    return diagnose_rollouts(Path(options.rollouts), options.model, declared, limit)


_ROLLOUT_OPTIONS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 < value < math.inf, "a finite number above 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1 (1 = no filter)"),
    "top_k": (lambda value: value >= 1, "1 or more; omit it without such a filter"),
    "min_p": (lambda value: 0 <= value < 1, "a number from 0 (no filter) to below 1"),
    "limit": (lambda value: value >= 1, "1 or more; omit it to read all responses"),
}
"""Options of --rollouts: the check of a value and the expected range for errors. NaN fails every check."""
