"""``megatron-dppo examples`` and ``megatron-dppo convert``: what comes with the package beside its code.

A checkout has these folders beside the package; in a wheel they are in ``megatron_dppo/shipped`` (setup.py).
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files.disk import disk_errors

TOOLS: Mapping[str, str] = {
    "hf-to-megatron": "convert_hf_to_megatron.py",
    "megatron-to-hf": "convert_megatron_to_hf.py",
    "adapter": "convert_adapter.py",
    "upcycle": "convert_upcycle.py",
    "check": "check_conversion.py",
}
"""Name of a conversion -> its script in ``tools/``."""
LAUNCH = "launch"
_NOT_COPIED = shutil.ignore_patterns("__pycache__")


def shipped_folder(name: str, package: Path = Path(__file__).parents[1]) -> Path:
    """The folder ``examples``, ``launch`` or ``tools``.

    Args:
        name: of the folder.
        package: the folder of the package's code.

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


def add_examples_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``examples``."""
    parser.add_argument("name", nargs="*", help="which to copy; without any: list them")
    parser.add_argument("--to", default=".", help="copy to DIR/examples/NAME and DIR/launch (the current folder)")


def run_examples(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List or copy examples and launch scripts; nothing that exists is touched.

    Raises:
        UserError: no such example, or its target exists; nothing was copied then.
    """
    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; examples takes names and --to DIR")
    examples = shipped_folder("examples")
    sources = {folder.name: folder for folder in sorted(examples.iterdir()) if folder.is_dir()}
    sources[LAUNCH] = shipped_folder(LAUNCH)
    if not options.name:
        for name, folder in sources.items():
            files = sorted(str(f.relative_to(folder)) for f in folder.glob("*") if f.suffix in (".toml", ".py", ".sh"))
            print(f"{name:15} {', '.join(files) or 'data files'}")
        print("\nmegatron-dppo examples NAME... --to DIR copies them")
        return 0
    unknown = [name for name in options.name if name not in sources]
    if unknown:
        raise ConfigError(f"example {unknown[0]!r}; expected some of {', '.join(sources)}")
    targets = {
        name: Path(options.to) / (LAUNCH if name == LAUNCH else f"examples/{name}")
        for name in dict.fromkeys(options.name)
    }
    for target in targets.values():
        if target.exists() or target.is_symlink():
            raise ConfigError(f"{target} already exists; choose another folder by --to, or move it away")
    for name, target in targets.items():
        _copy(sources[name], target)
        print(target)
    return 0


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all."""
    with disk_errors(target, "the files"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            shutil.copytree(source, Path(folder) / target.name, ignore=_NOT_COPIED)
            (Path(folder) / target.name).rename(target)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``convert``; all after the first are the conversion's own."""
    parser.add_argument("conversion", choices=list(TOOLS), help="NAME --help has its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the conversion")


def run_convert(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one of the conversion tools as it is; also under torchrun, for large models.

    Raises:
        SystemExit: with the tool's exit code.
    """
    script = shipped_folder("tools") / TOOLS[options.conversion]
    sys.argv = [str(script), *options.arguments, *overrides]
    runpy.run_path(str(script), run_name="__main__")
    return 0
