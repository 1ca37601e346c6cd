"""The commands of ``megatron-dppo``: modules that packages offer as entry points of one group."""

import argparse
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Protocol, cast

from megatron_dppo.errors import ConfigError
from megatron_dppo.functions.packages import INSTALL, installed, package_name

GROUP = "megatron_dppo.commands"


class Command(Protocol):
    """Interface of a command; a module has these names."""

    HELP: str
    """Line for ``megatron-dppo --help``."""
    HAS_OVERRIDES: bool
    """True if unknown arguments are overrides of a configuration."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the arguments of the command."""

    def run(self, options: argparse.Namespace, overrides: Sequence[str], /) -> int:
        """Run with the arguments that the parser knows and those that it does not; return the exit code."""


def installed_commands() -> dict[str, EntryPoint]:
    """Return the commands of all installed packages by name; nothing is imported."""
    points = installed(GROUP)
    if "train" not in points:
        raise ConfigError(
            f"expected the entry points {GROUP} of megatron-dppo, got none: its source is used without an installation "
            f"of this version. Fix: {INSTALL}, or python -m megatron_dppo.train CONFIG"
        )
    return points


def load_command(point: EntryPoint) -> Command:
    """Import the module of a command."""
    module = point.load()
    missing = [name for name in ("HELP", "HAS_OVERRIDES", "add_arguments", "run") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"the command {point.name} of {package_name(point)}: {point.value} has no {', '.join(missing)}. Fix: "
            "install another version of that package, or uninstall it"
        )
    return cast(Command, module)
