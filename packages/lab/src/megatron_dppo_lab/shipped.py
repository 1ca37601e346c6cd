"""Folders beside the package that its wheel has, too."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo import files
from megatron_dppo.errors import UserError

_PACKAGE = Path(files.__file__).parent


def shipped_folder(name: str, package: Path = _PACKAGE) -> Path:
    """Return the folder ``examples`` or ``launch``.

    A checkout has it beside the package; in a wheel it is in ``megatron_dppo/shipped`` (setup.py).

    Args:
        name: Name of the folder.
        package: Folder of the package's code.

    Raises:
        UserError: The folder is missing.
    """
    inside = package / "shipped" / name
    beside = package.parent / name
    if inside.is_dir():
        return inside
    # site-packages may hold an "examples" folder of another project.
    if beside.is_dir() and (package.parent / "setup.py").is_file():
        return beside
    raise UserError(f"no {name}/ in {inside.parent} or beside a checkout's setup.py: install the package again")
