"""``megatron-dppo diagnose``: where the difference between engine and trainer comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diagnose``; all others are overrides of the run's configuration."""
    parser.add_argument("run", nargs="?", help="folder of a run (run.output_dir) that is not running")
    parser.add_argument("--json", metavar="FILE", help="also write the ledger as JSON")


def run_diagnose(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the ledger; the exit code is 1 if it does not close, else 0.

    Raises:
        UserError: what is to be diagnosed cannot be.
    """
    from megatron_dppo.diagnose.ledger import as_text

    if options.run is None:
        raise ConfigError("diagnose needs the folder of a run: megatron-dppo diagnose RUN")
    from megatron_dppo.diagnose.run import diagnose_run

    ledger = diagnose_run(Path(options.run), overrides)
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{as_text(ledger)}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(ledger.plain(), indent=2) + "\n", encoding="utf-8")
    return 1 if ledger.closes is False else 0
