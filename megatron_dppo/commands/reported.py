"""Commands end with a message and an exit code instead of a traceback."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megatron_dppo.commands.extras import missing_extra
from megatron_dppo.commands.registry import Command
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import raise_file_limit
from megatron_dppo.report.printable import printable

_SMALLEST = {
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "RANK": 0,
    "LOCAL_RANK": 0,
    "MASTER_PORT": 0,  # 0: a process that runs alone has chosen a free port
    "SLURM_RESTART_COUNT": 0,
}
_LARGEST = 10_000_000


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


def check_launcher_variables() -> None:
    """Check the variables that torchrun and Slurm set: whole numbers, and a rank below its world size."""
    numbers = {}
    for name, smallest in _SMALLEST.items():
        text = os.environ.get(name)
        if text is None or (name == "SLURM_RESTART_COUNT" and not text):
            continue
        # int() also reads "1_0", " 1" and digits of other scripts, which launchers never write.
        if not (text.isascii() and text.isdigit() and smallest <= int(text[:9]) and int(text[:9]) < _LARGEST):
            raise ConfigError(
                f"{name} = {text[:40]!r} in the environment; expected a whole number of at least {smallest}. torchrun "
                "sets it; unset it to run one process"
            )
        numbers[name] = int(text)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            raise ConfigError(
                f"{rank} = {numbers[rank]} and {size} = {numbers[size]} in the environment; expected a rank below the "
                "size. torchrun sets both; unset them to run one process"
            )
