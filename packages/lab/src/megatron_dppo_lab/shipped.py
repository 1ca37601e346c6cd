"""Folders beside the package that its wheel has, too."""

from pathlib import Path

from megatron_dppo import errors

_PACKAGE = Path(errors.__file__).parent


def shipped_folder(name: str, package: Path = _PACKAGE) -> Path:
    """Return the folder ``examples`` or ``launch``.

    A checkout has it beside the package; in a wheel it is in ``megatron_dppo/shipped`` (setup.py).
    """
    inside = package / "shipped" / name
    beside = package.parent / name
    if inside.is_dir():
        return inside
    # site-packages may hold an "examples" folder of another project.
    if beside.is_dir() and (package.parent / "setup.py").is_file():
        return beside
    raise errors.UserError(f"no {name}/ in {inside.parent} or beside a checkout's setup.py: install the package again")
