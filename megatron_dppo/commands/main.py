"""``megatron-dppo COMMAND``."""

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
from megatron_dppo.commands.answers import add_eval_arguments, add_generate_arguments, run_eval, run_generate
from megatron_dppo.commands.convert import add_convert_arguments, run_convert
from megatron_dppo.commands.diagnose.command import add_diagnose_arguments, run_diagnose
from megatron_dppo.commands.doctor.command import add_doctor_arguments, run_doctor
from megatron_dppo.commands.experiments.command import add_experiment_arguments, run_experiment
from megatron_dppo.commands.experiments.demo_command import add_demo_arguments, run_demo
from megatron_dppo.commands.help import add_help_arguments, run_help
from megatron_dppo.commands.plan.command import add_plan_arguments, run_plan
from megatron_dppo.commands.port.command import add_port_arguments, run_port
from megatron_dppo.commands.replay.command import add_replay_arguments, run_replay
from megatron_dppo.commands.report import add_report_arguments, run_report
from megatron_dppo.commands.restarts import add_restarts_arguments, run_restarts
from megatron_dppo.commands.serve import add_serve_arguments, run_serve
from megatron_dppo.commands.shipped import add_examples_arguments, run_examples
from megatron_dppo.errors import ConfigError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (docs/launch.md has them all)."""
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
        if not _has_lost_its_reader():
            raise
        # As `head` does when it has seen enough; at its end Python would try to flush the output again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    return code


def _has_lost_its_reader() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _Version(argparse.Action):
    """The package's version and what a report of a fault needs of the environment."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the versions of the package and what it stands on")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parts = [f"python {platform.python_version()}"]
        for name in ("torch", "megatron-core", "transformers"):
            with suppress(PackageNotFoundError):
                parts.append(f"{name} {version(name)}")
        print(f"megatron-dppo {__version__} ({', '.join(parts)})")
        parser.exit()


_Run = Callable[[argparse.Namespace, Sequence[str]], int]


def run_or_report(command: _Run, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run a command; a UserError becomes its message and exit code."""
    try:
        return command(options, overrides)
    except UserError as error:
        return report_error(error)


_OVERRIDES = (
    "Overrides: --section.key VALUE for any key of the configuration, and Megatron's own flags as they stand, e.g. "
    "--tensor-model-parallel-size 2. `megatron-dppo help KEY` says what a key means."
)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``train``; all others are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved configuration, stop"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="with --dry-run: processes of the run (default: WORLD_SIZE, or the fewest of the layout)",
    )


def train_main(arguments: Sequence[str] | None = None) -> int:
    """``python -m megatron_dppo.train CONFIG``: the same program as ``megatron-dppo train CONFIG``."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dppo.train", epilog=_OVERRIDES)
    add_train_arguments(parser)
    options, overrides = parser.parse_known_args(arguments)
    return run_train(options, overrides)


def run_train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Load the configuration, then train or, with ``--dry-run``, report everything that would stop the run."""
    from megatron_dppo.commands.dry_run import dry_run
    from megatron_dppo.config.io import invalid_config, read_config

    try:
        if options.world_size is not None and not options.dry_run:
            raise ConfigError(f"--world-size {options.world_size} is for --dry-run; a run counts its own processes")
        found = read_config(options.config, overrides)
        if options.dry_run:
            return dry_run(options.config, found, options.world_size)
        if found.problems or found.config is None:
            raise invalid_config(options.config, found.problems)
        from megatron_dppo.run.loop import run

        return run(found.config)
    except UserError as error:
        return report_error(error)
    except RuntimeError as error:
        if not any(text in str(error) for text in _LOST_PEER):
            raise
        print(f"[rank {os.environ.get('RANK', '0')}] ends because another rank has ended", file=sys.stderr, flush=True)
        return 1


_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says of a rank that is gone; that rank, or its launcher, says why."""


def report_error(error: UserError) -> int:
    """Print the message once, on the rank that should; the exit code is the error's."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not error.on_every_rank:
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        prefix = "" if error.on_every_rank or alone else f"[rank {rank}] "
        print(f"\n{prefix}error: {error}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all processes when the first one leaves: give rank 0 the time to say what is wrong.
        time.sleep(2.0)
    return error.exit_code


@dataclass(frozen=True)
class _Command:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: _Run
    has_overrides: bool = True


def _reported(command: _Run) -> _Run:
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
    "train": _Command("post-train a model by a configuration file", add_train_arguments, run_train),
    "help": _Command("what a key of the configuration means", add_help_arguments, _reported(run_help), False),
    "serve": _Command("start the inference servers of a run", add_serve_arguments, _reported(run_serve)),
    "eval": _Command("evaluate a run's weights, or a Hugging Face folder", add_eval_arguments, _reported(run_eval)),
    "generate": _Command("answer prompts with such weights", add_generate_arguments, _reported(run_generate)),
    "plan": _Command("rehearse a run without GPUs: memory, collectives, time", add_plan_arguments, _reported(run_plan)),
    "port": _Command(
        "a launch script or configuration of verl, slime or prime-rl as ours",
        add_port_arguments,
        _reported(run_port),
        has_overrides=False,
    ),
    "doctor": _Command(
        "what is installed, what does not go together, servers, a self-test; text for a report",
        add_doctor_arguments,
        _reported(run_doctor),
    ),
    "restarts": _Command(
        "for launch scripts: whether a job is queued again", add_restarts_arguments, _reported(run_restarts)
    ),
    "experiment": _Command(
        "compare losses under controlled mismatches, on small embedded tasks",
        add_experiment_arguments,
        _reported(run_experiment),
        has_overrides=False,
    ),
    "report": _Command(
        "a run, or two, as one HTML file: curves, masked tokens, responses, findings",
        add_report_arguments,
        _reported(run_report),
        has_overrides=False,
    ),
    "replay": _Command("compute a recorded step again", add_replay_arguments, _reported(run_replay)),
    "diagnose": _Command(
        "split |log pi - log mu| of a run into its causes", add_diagnose_arguments, _reported(run_diagnose)
    ),
}


if __name__ == "__main__":
    sys.exit(main())
