"""Command line of the package: ``megatron-dppo COMMAND``."""

import argparse
import os
import platform
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from megatron_dppo import __version__
from megatron_dppo.commands import train
from megatron_dppo.commands.registry import installed_commands, load_command
from megatron_dppo.commands.reported import report_error, run_reported
from megatron_dppo.commands.streams import prepare_streams
from megatron_dppo.errors import UserError

_OVERRIDES = (
    "Overrides: --section.key VALUE for any key of the configuration, and Megatron's own flags, e.g. "
    "--tensor-model-parallel-size 2. `megatron-dppo help KEY` explains a key."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (docs/launch.md lists them)."""
    prepare_streams()
    try:
        return _run_command(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # The reader, such as `head`, has exited. Python flushes stdout again at exit, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def train_main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m megatron_dppo.train CONFIG``, the same as ``megatron-dppo train CONFIG``."""
    prepare_streams()
    parser = argparse.ArgumentParser(prog="python -m megatron_dppo.train", epilog=_OVERRIDES)
    train.add_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    return run_reported("train", train, options, overrides)


def _run_command(arguments: Sequence[str]) -> int:
    points = installed_commands()
    # Only the command that is named is imported; all of them for their list.
    named = next((word for word in arguments if not word.startswith("-")), None)
    commands = {
        name: load_command(point) for name, point in points.items() if named in (name, None) or named not in points
    }
    parser = argparse.ArgumentParser(prog="megatron-dppo", description=__doc__)
    parser.add_argument("--version", action=_Version)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        epilog = _OVERRIDES if command.HAS_OVERRIDES else None
        command.add_arguments(parsers.add_parser(name, help=command.HELP, epilog=epilog, allow_abbrev=False))
    options, overrides = parser.parse_known_args(arguments)
    code = run_reported(options.command, commands[options.command], options, overrides)
    sys.stdout.flush()
    return code


def _is_stdout_closed() -> bool:
    """Return True if standard output is a pipe without a reader."""
    poll = select.poll()
    # POLLERR and POLLHUP are reported without being asked for.
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _Version(argparse.Action):
    """``--version``: the versions of the package and its main dependencies, for bug reports."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the versions of the package and its dependencies")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parts = [f"python {platform.python_version()}"]
        for name in ("torch", "megatron-core", "transformers"):
            with suppress(PackageNotFoundError):
                parts.append(f"{name} {version(name)}")
        print(f"megatron-dppo {__version__} ({', '.join(parts)})")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
