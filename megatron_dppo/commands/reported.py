"""Commands end with a message and an exit code instead of a traceback."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megatron_dppo.commands.extras import missing_extra
from megatron_dppo.commands.launcher_variables import check_launcher_variables
from megatron_dppo.commands.registry import Command
from megatron_dppo.errors import UserError
from megatron_dppo.files import raise_file_limit
from megatron_dppo.report.printable import printable


def run_reported(name: str, command: Command, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run a command; report a UserError, or a package that is not installed, by its message and exit code."""
    try:
        check_launcher_variables()
        raise_file_limit()
        return command.run(options, overrides)
    except UserError as error:
        return report_error(error)
    except ModuleNotFoundError as error:
        return report_error(missing_extra(error, name))


def report_error(error: UserError) -> int:
    """Print the message once, on the rank that should, and return the error's exit code."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not error.on_every_rank:
        is_single_process = os.environ.get("WORLD_SIZE", "1") == "1"
        prefix = "" if error.on_every_rank or is_single_process else f"[rank {rank}] "
        print(f"\n{prefix}error: {printable(str(error))}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all processes when the first one exits: leave rank 0 the time to print the error.
        time.sleep(2.0)
    return error.exit_code
