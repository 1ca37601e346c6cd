"""``megatron-dppo diagnose``: where the difference between engine and trainer comes from."""

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

if TYPE_CHECKING:
    from megatron_dppo.commands.diagnose.ledger import Ledger


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diagnose``; all others are overrides of the run's configuration."""
    parser.add_argument("run", nargs="?", help="folder of a run (run.output_dir) that is not running")
    parser.add_argument("--rollouts", metavar="FILE", help="instead of a run: rollouts that verl, slime or TRL wrote")
    parser.add_argument("--model", metavar="FOLDER", help="with --rollouts: the weights that trained on them")
    parser.add_argument("--limit", type=int, help="with --rollouts: look at the first N responses")
    parser.add_argument("--temperature", type=float, help="with --rollouts: of the sampling (default 1)")
    parser.add_argument("--top-p", type=float, help="with --rollouts: of the sampling, as the next two (default: none)")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ledger as JSON; a new file")


def run_diagnose(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the ledger; the exit code is 1 if it does not close, else 0.

    Raises:
        UserError: what is to be diagnosed cannot be, an argument is wrong, or the JSON file cannot be written.
    """
    from megatron_dppo.commands.diagnose.ledger import as_text

    if (options.run is None) == (options.rollouts is None):
        raise ConfigError("diagnose needs either the folder of a run, or --rollouts FILE with --model FOLDER")
    require_new(options.json, "--json")
    ledger = _of_run(options, overrides) if options.rollouts is None else _of_rollouts(options, overrides)
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{as_text(ledger)}", flush=True)
        if options.json is not None:
            write_new(options.json, json.dumps(ledger.plain(), indent=2) + "\n")
    return 1 if ledger.closes is False else 0


def _of_run(options: argparse.Namespace, overrides: Sequence[str]) -> Ledger:
    from megatron_dppo.commands.diagnose.run import diagnose_run

    if given := [name for name in (*_ALLOWED, "model") if getattr(options, name) is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')} goes with --rollouts; a run's own configuration says it")
    return diagnose_run(Path(options.run), overrides)


def _of_rollouts(options: argparse.Namespace, overrides: Sequence[str]) -> Ledger:
    from megatron_dppo.commands.diagnose.foreign import Declared, diagnose_rollouts

    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}: --rollouts has no configuration to override")
    if options.model is None:
        raise ConfigError("--rollouts needs --model FOLDER: the Hugging Face folder of the weights that train on them")
    given = {name: getattr(options, name) for name in _ALLOWED if getattr(options, name) is not None}
    for name, value in given.items():
        is_allowed, expected = _ALLOWED[name]
        if not is_allowed(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {expected}")
    limit = given.pop("limit", None)
    return diagnose_rollouts(Path(options.rollouts), options.model, Declared(**given), limit)


_ALLOWED: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 < value < math.inf, "a finite number above 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1 (1 = no filter)"),
    "top_k": (lambda value: value >= 1, "1 or more; leave it out where there was no such filter"),
    "min_p": (lambda value: 0 <= value < 1, "a number from 0 (no filter) to below 1"),
    "limit": (lambda value: value >= 1, "1 or more; leave it out to look at all responses"),
}
"""The arguments that go with --rollouts alone: which values there are, and how to say it. NaN is within no bounds."""
