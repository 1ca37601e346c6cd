"""Command line of the package: ``megatron-dppo COMMAND``."""

from __future__ import annotations

import argparse
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from megatron_dppo import __version__
from megatron_dppo.commands.convert import add_convert_arguments, run_convert
from megatron_dppo.commands.diagnose.command import add_diagnose_arguments, run_diagnose
from megatron_dppo.commands.doctor.command import add_doctor_arguments, run_doctor
from megatron_dppo.commands.doctor.extras import missing_extra
from megatron_dppo.commands.examples import add_examples_arguments, run_examples
from megatron_dppo.commands.experiments.command import add_experiment_arguments, run_experiment
from megatron_dppo.commands.experiments.demo_command import add_demo_arguments, run_demo
from megatron_dppo.commands.help import add_help_arguments, run_help
from megatron_dppo.commands.inference import add_eval_arguments, add_generate_arguments, run_eval, run_generate
from megatron_dppo.commands.launcher_variables import check_launcher_variables
from megatron_dppo.commands.plan.command import add_plan_arguments, run_plan
from megatron_dppo.commands.port.command import add_port_arguments, run_port
from megatron_dppo.commands.replay.command import add_replay_arguments, run_replay
from megatron_dppo.commands.report import add_report_arguments, run_report
from megatron_dppo.commands.restarts import add_restarts_arguments, run_restarts
from megatron_dppo.commands.serve import add_serve_arguments, run_serve
from megatron_dppo.commands.streams import prepare_streams
from megatron_dppo.commands.tasks import add_tasks_arguments, run_tasks
from megatron_dppo.commands.tinker import add_tinker_arguments, run_tinker
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import raise_file_limit, require_open_files
from megatron_dppo.report.printable import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (docs/launch.md lists them)."""
    prepare_streams()
    parser = argparse.ArgumentParser(prog="megatron-dppo", description=__doc__)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        epilog = _OVERRIDES if command.has_overrides else None
        command.add_arguments(commands.add_parser(name, help=command.help, epilog=epilog, allow_abbrev=False))
    try:
        options, overrides = parser.parse_known_args(arguments)
        code = _COMMANDS[options.command].run(options, overrides)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # The reader, such as `head`, has exited. Python flushes stdout again at exit, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
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


_Run = Callable[[argparse.Namespace, Sequence[str]], int]


def run_or_report(command: _Run, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run a command; report a UserError, or a package that is not installed, by its message and exit code."""
    try:
        check_launcher_variables()
        raise_file_limit()
        return command(options, overrides)
    except UserError as error:
        return report_error(error)
    except ModuleNotFoundError as error:
        return report_error(missing_extra(error, options.command))


_OVERRIDES = (
    "Overrides: --section.key VALUE for any key of the configuration, and Megatron's own flags, e.g. "
    "--tensor-model-parallel-size 2. `megatron-dppo help KEY` explains a key."
)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--dry-run", action="store_true", help="run all checks, print layout and batch sizes, stop")
    parser.add_argument(
        "--world-size",
        type=int,
        help="with --dry-run: number of processes (default: WORLD_SIZE, or the smallest that fits the layout)",
    )
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: also print the resolved configuration")


def train_main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m megatron_dppo.train CONFIG``, the same as ``megatron-dppo train CONFIG``."""
    prepare_streams()
    parser = argparse.ArgumentParser(prog="python -m megatron_dppo.train", epilog=_OVERRIDES)
    add_train_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    return run_train(options, overrides)


def run_train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Load the configuration, then train or, with ``--dry-run``, report everything that would stop the run."""
    try:
        from megatron_dppo.commands.dry_run import dry_run
        from megatron_dppo.config.io import invalid_config, read_config

        check_launcher_variables()
        require_open_files()
        if options.world_size is not None and not options.dry_run:
            raise ConfigError(
                f"--world-size {options.world_size} needs --dry-run. Fix: remove it; torchrun or srun sets the number "
                "of processes of a run"
            )
        # The only command that reads a configuration to train with it; a dry run scores an answer.
        loaded = read_config(options.config, overrides, with_functions=True)
        if options.dry_run:
            return dry_run(options.config, loaded, options.world_size, verbose=options.verbose)
        if loaded.problems or loaded.config is None:
            raise invalid_config(options.config, loaded.problems)
        from megatron_dppo.run.loop import run

        return run(loaded.config)
    except UserError as error:
        return report_error(error)
    except ModuleNotFoundError as error:
        return report_error(missing_extra(error, "train"))
    except RuntimeError as error:
        if not any(text in str(error) for text in _LOST_PEER_MESSAGES):
            raise
        rank = os.environ.get("RANK", "0")
        print(f"[rank {rank}] stops because another rank exited; see that rank's error", file=sys.stderr, flush=True)
        return 1


_LOST_PEER_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo after another rank exited. The cause is in that rank's output or its launcher's."""


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


@dataclass(frozen=True)
class _Command:
    """A command of the command line."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: _Run
    has_overrides: bool = True
    """True if unknown arguments are overrides of a configuration."""


def _reported(command: _Run) -> _Run:
    """Wrap a command so that a UserError ends it with a message instead of a traceback."""
    return partial(run_or_report, command)


_COMMANDS = {
    "demo": _Command(
        "DPPO, ratio clipping and no trust region side by side, in minutes on a CPU",
        add_demo_arguments,
        _reported(run_demo),
        has_overrides=False,
    ),
    "examples": _Command(
        "list, copy or run the examples; copy the launch scripts",
        add_examples_arguments,
        _reported(run_examples),
    ),
    "convert": _Command(
        "convert weights: Hugging Face, Megatron, adapters, mixtures of experts, FP8",
        add_convert_arguments,
        _reported(run_convert),
        has_overrides=False,
    ),
    "train": _Command("post-train a model with a configuration file", add_train_arguments, run_train),
    "help": _Command("explain a key of the configuration", add_help_arguments, _reported(run_help), False),
    "serve": _Command("start the inference servers of a run", add_serve_arguments, _reported(run_serve)),
    "eval": _Command("evaluate a run's weights, or a Hugging Face folder", add_eval_arguments, _reported(run_eval)),
    "generate": _Command(
        "generate responses with a run's weights, or a Hugging Face folder's",
        add_generate_arguments,
        _reported(run_generate),
    ),
    "plan": _Command("estimate a run without GPUs: memory, collectives, time", add_plan_arguments, _reported(run_plan)),
    "port": _Command(
        "translate a launch script or configuration of verl, slime or prime-rl",
        add_port_arguments,
        _reported(run_port),
        has_overrides=False,
    ),
    "doctor": _Command(
        "check versions, known-bad combinations and servers, run a self-test; paste its output into bug reports",
        add_doctor_arguments,
        _reported(run_doctor),
    ),
    "restarts": _Command(
        "for launch scripts: decide whether to requeue a job", add_restarts_arguments, _reported(run_restarts)
    ),
    "tinker": _Command("serve the Tinker API on this machine", add_tinker_arguments, _reported(run_tinker)),
    "tasks": _Command("write the tasks of agent.environment as data", add_tasks_arguments, _reported(run_tasks)),
    "experiment": _Command(
        "compare losses under controlled mismatches, on small embedded tasks",
        add_experiment_arguments,
        _reported(run_experiment),
        has_overrides=False,
    ),
    "report": _Command(
        "write one or two runs as an HTML file: curves, masked tokens, responses, findings",
        add_report_arguments,
        _reported(run_report),
        has_overrides=False,
    ),
    "replay": _Command("recompute a recorded step and compare", add_replay_arguments, _reported(run_replay)),
    "diagnose": _Command(
        "attribute |log pi - log mu| of a run to its causes", add_diagnose_arguments, _reported(run_diagnose)
    ),
}


if __name__ == "__main__":
    sys.exit(main())
