"""The tables of a TOML file, joined with those of the file that it ``extends``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from megatron_dppo.config.paths import resolve_paths
from megatron_dppo.errors import ConfigError


def read_tables(file: Path, relative_to: Path | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file with ``extends`` carried out, and with paths as seen from the working directory.

    Example: ``b.toml`` holds ``extends = "a.toml"`` and ``[loss] topk = 8``; of ``[loss] name = "dppo_topk_tv"`` in
    ``a.toml`` and its other tables nothing is lost.

    Args:
        file: of the configuration.
        relative_to: the folder that its paths are relative to; None = the file's. That of a file which is extended is
            its own.
        seen: the files that extend this one, resolved.

    Raises:
        ConfigError: there is no such file, or it is no TOML, or files extend each other in a circle.
    """
    where = f" (which {str(seen[-1])!r} extends)" if seen else ""
    place = file.resolve()
    if place in seen:
        circle = " -> ".join(str(path) for path in (*seen[seen.index(place) :], place))
        raise ConfigError(f"configuration files extend each other in a circle: {circle}; take one 'extends' out")
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} does not exist") from error
    except OSError as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(file)!r}{where} is not valid TOML: {error}") from error
    base = values.pop("extends", None)
    resolve_paths(values, relative_to or file.parent)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{file}: extends = {base!r}: expected the path of one TOML file, relative to this one")
    return joined(read_tables(file.parent / base, None, (*seen, place)), values)


def joined(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says: tables key by key, anything else replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = joined(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
