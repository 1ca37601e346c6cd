#!/usr/bin/env python
"""Write requirements/lock.txt and the pins of pyproject.toml anew: ``.venv/bin/python tools/lock_requirements.py``.

The versions are those installed for the interpreter that runs this script, so the tests ran with them. A package that
is not installed gets its newest compatible version. Markers name the Python and platform of a pin. pip and uv read the
same pins: pip as constraints (``-c requirements/lock.txt``), uv as the ``constraint-dependencies`` of pyproject.toml.
The lock has no hashes and no URLs. Those of a uv.lock belong to one index, so a private index or the CPU build of torch
would not match.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK, PROJECT = ROOT / "requirements/lock.txt", ROOT / "pyproject.toml"
EXTRAS = ("dev", "data", "wandb", "reasoning-gym")
"""Extras of setup.py that belong to the training environment on every machine."""
NOT_FROM_ENVIRONMENT = {
    "megatron-core": "the version for Python 3.11 differs from the one for newer Pythons",
    "megatron-dppo": "the package itself",
}
"""Packages whose installed version is not used, with the reason."""
_HEADER = "# Written by tools/lock_requirements.py, which says how it is used. Python 3.11 and newer.\n"


_BEGIN = "[tool.uv]\n# The rest of this file is written by tools/lock_requirements.py.\n"


def installed() -> list[str]:
    """Return the ``name==version`` pins of the environment, without local parts such as ``+cpu``."""
    versions = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    return [
        f"{name}=={version.partition('+')[0]}"
        for name, version in sorted(versions.items())
        if name not in NOT_FROM_ENVIRONMENT
    ]


def resolve() -> list[str]:
    """Return the pins with their markers.

    Raises:
        ValueError: If one of them is a URL.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(installed()) + "\n")
        constraints.flush()
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "setup.py", "-c", constraints.name]
        command += [part for extra in EXTRAS for part in ("--extra", extra)]
        command += ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate"]
        command += ["--no-config", "--no-emit-index-url", "--no-emit-find-links"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    if wrong := [line for line in lines if "://" in line or not re.match(r"[A-Za-z0-9._-]+==", line)]:
        raise ValueError(f"Expected NAME==VERSION, got {wrong[0]!r}")
    return lines


def replace_pins(project: str, pins: list[str]) -> str:
    """Return the text of pyproject.toml with these pins at its end."""
    listed = "".join(f"    {json.dumps(pin)},\n" for pin in pins)
    return f"{project.partition(_BEGIN)[0].rstrip()}\n\n{_BEGIN}constraint-dependencies = [\n{listed}]\n"


def main() -> None:
    """Resolve, then write both files."""
    pins = resolve()
    LOCK.write_text(_HEADER + "".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    PROJECT.write_text(replace_pins(PROJECT.read_text(encoding="utf-8"), pins), encoding="utf-8")
    print(f"{len(pins)} pins in {LOCK.relative_to(ROOT)} and {PROJECT.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
