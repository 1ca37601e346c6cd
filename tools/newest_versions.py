"""Print the newest release, on every Python of this package, of what it pins or plugs into.

Usage: ``python tools/newest_versions.py [NAME ...]``. It needs the network, and asks pip. A package may have a newer
release for a newer Python: ``skyrl`` is such a one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DIRECT_PINS = ("agents", "clients", "openenv", "plugins", "verifiers")
"""Lists of ``tools/engines`` with what is used itself; the others also have what that requires."""
_OTHERS = ("megatron-core", "megatron-bridge", "transformer-engine", "transformers", "accelerate", "peft")
"""Packages whose versions the pages and setup.py name, besides the pins."""
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;]+)", re.MULTILINE)


def pythons() -> list[str]:
    """Return the versions of Python that setup.py names, such as ``3.11``."""
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text(encoding="utf-8"))


def pinned() -> dict[str, set[str]]:
    """Return the pinned versions by package. Empty without a pin."""
    versions: dict[str, set[str]] = {}
    for name in _DIRECT_PINS:
        for package, version in _PIN.findall((ROOT / f"tools/engines/{name}_requirements.txt").read_text()):
            versions.setdefault(package, set()).add(version)
    tested_file = ROOT / "packages/engines/src/megatron_dppo_engines/serving/versions.toml"
    tested = tomllib.loads(tested_file.read_text())["tested"]
    for name, version in tested.items():
        versions.setdefault(name.removesuffix("_newest"), set()).add(version)
    locked = _PIN.findall((ROOT / "requirements/lock.txt").read_text())
    for package in _OTHERS:
        versions[package] = {version for name, version in locked if name == package}
    return versions


def newest(package: str, python: str) -> str:
    """Return the newest release with a wheel for a Python on Linux; ``none`` if there is none."""
    wheels = ("--only-binary", ":all:", "--python-version", python)
    command = [sys.executable, "-m", "pip", "index", "versions", package, *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.match(rf"{re.escape(package)} \(([^)]+)\)", done.stdout, re.IGNORECASE)
    if match is None and "No matching distribution" not in done.stderr:
        raise SystemExit(f"pip cannot ask for {package}: {done.stderr.strip()[-500:]}")
    return match[1] if match else "none"


def table(
    pins: Mapping[str, Iterable[str]], versions: Sequence[str], find: Callable[[str, str], str] = newest
) -> list[list[str]]:
    """Return a row for each package: name, pins, the newest release by Python, and what differs."""
    rows = [["package", "pinned", *versions, ""]]
    for package in sorted(pins):
        by_python = [find(package, python) for python in versions]
        released = set(by_python) - {"none"}
        remarks = ["differs by Python"] * (len(set(by_python)) > 1)
        remarks += ["newer than the pin"] * bool(pins[package] and released and not released & set(pins[package]))
        rows.append([package, ", ".join(sorted(pins[package])) or "-", *by_python, "; ".join(remarks)])
    return rows


def main() -> None:
    """Print the table."""
    pins = pinned()
    chosen = sys.argv[1:] or sorted(pins)
    rows = table({name: pins.get(name, set()) for name in chosen}, pythons())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
