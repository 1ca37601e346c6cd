"""The commands of ``megatron-dppo``: modules that packages offer as entry points of one group."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

from megatron_dppo.errors import ConfigError

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
    """Return the commands of all installed packages by name; nothing is imported.

    Raises:
        ConfigError: Two packages offer one name, or this package itself is not installed, or an older version of it.
    """
    points = _by_name(entry_points(group=GROUP))
    if "train" not in points:
        raise ConfigError(
            f"expected the entry points {GROUP} of megatron-dppo, got none: its source is used without an installation "
            "of this version. Fix: pip install -e . in its clone, or python -m megatron_dppo.train CONFIG"
        )
    return points


def _by_name(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    result: dict[str, EntryPoint] = {}
    for point in sorted(points, key=lambda point: point.name):
        other = result.setdefault(point.name, point)
        # A library may be installed alone and as a part of megatron-dppo.
        if other.value != point.value:
            raise ConfigError(
                f"two packages offer the command {point.name}: {other.value} of {_owner(other)} and {point.value} of "
                f"{_owner(point)}. Fix: pip uninstall one of them"
            )
    return result


def load_command(point: EntryPoint) -> Command:
    """Import the module of a command.

    Raises:
        ConfigError: It has not what a command needs.
    """
    module = point.load()
    missing = [name for name in ("HELP", "HAS_OVERRIDES", "add_arguments", "run") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"the command {point.name} of {_owner(point)}: {point.value} has no {', '.join(missing)}. Fix: install "
            "another version of that package, or uninstall it"
        )
    return cast(Command, module)


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
