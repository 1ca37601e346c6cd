"""Objects that installed packages offer by name: entry points of one group."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from megatron_dppo.errors import ConfigError

INSTALL = "pip install -e . in the clone of megatron_dppo"
"""Fix for a package of this repository without metadata: the source of a clone is used, and it is not installed."""


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages by name; nothing is imported."""
    result: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = result.setdefault(point.name, point)
        # A library may be installed alone and as a part of megatron-dppo.
        if other.value != point.value:
            raise ConfigError(
                f"two packages offer {point.name} of {group}: {other.value} of {package_name(other)} and {point.value} "
                f"of {package_name(point)}. Fix: pip uninstall one of them"
            )
    return result


def load(point: EntryPoint) -> Callable[..., object]:
    """Import what an entry point names."""
    try:
        return point.load()
    except Exception as error:  # a package from elsewhere may raise anything
        raise ConfigError(
            f"{point.name} of {point.group}: {point.value} of {package_name(point)} cannot be imported: "
            f"{type(error).__name__}: {error}. Fix: {INSTALL}, or another version of that package"
        ) from error


def load_only(group: str, name: str, setting: str) -> Callable[..., object]:
    """Import what the entry point ``name`` of a group names, which ``setting`` needs."""
    points = installed(group)
    if name not in points:
        raise ConfigError(
            f"{setting} needs a package with the entry point {name} of {group}, got {', '.join(points) or 'none'}. "
            f"Fix: {INSTALL}"
        )
    return load(points[name])


def package_name(point: EntryPoint) -> str:
    """Return the name of the package that offers an entry point."""
    return point.dist.name if point.dist is not None else "an unknown package"
