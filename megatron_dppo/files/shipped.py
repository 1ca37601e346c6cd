"""Folders that come with the package beside its code: ``examples``, ``launch`` and ``tools``."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.errors import UserError


def shipped_folder(name: str, package: Path = Path(__file__).parents[1]) -> Path:
    """Return the folder ``examples``, ``launch`` or ``tools``.

    A checkout has it beside the package; in a wheel it is in ``megatron_dppo/shipped`` (setup.py).

    Args:
        name: of the folder.
        package: folder of the package's code.

    Raises:
        UserError: it is not there.
    """
    inside, beside = package / "shipped" / name, package.parent / name
    if inside.is_dir():
        return inside
    # The folder of all packages may have an "examples" of somebody else's.
    if beside.is_dir() and (package.parent / "setup.py").is_file():
        return beside
    raise UserError(f"no {name}/ in {inside.parent} or beside a checkout's setup.py: install the package again")
