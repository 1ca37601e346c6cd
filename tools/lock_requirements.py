#!/usr/bin/env python
"""Write requirements/lock.txt and the pins of pyproject.toml anew: ``.venv/bin/python tools/lock_requirements.py``.

The versions are those of the interpreter that runs this, hence those that the tests ran with; what it does
not have is the newest that goes with them. Markers say what is for which Python and platform. pip and uv read the
same pins: pip as constraints (``-c requirements/lock.txt``), uv as the ``constraint-dependencies`` of pyproject.toml.
No hashes and no addresses: those of a uv.lock are one index's, and an index of your own, or the CPU build of torch,
would not fit.
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
"""those that go into the trainer's environment and are no matter of the machine"""
OWN = {"megatron-core": "it has one version for Python 3.11 and another one for newer", "megatron-dppo": "this is it"}
"""Not taken from the environment, and why."""
_HEADER = "# Written by tools/lock_requirements.py, which says how it is used. Python 3.11 and newer.\n"


_BEGIN = "[tool.uv]\n# The rest of this file is written by tools/lock_requirements.py.\n"


def installed() -> list[str]:
    """``name==version`` of the environment, without local parts such as ``+cpu``."""
    found = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items()) if name not in OWN]


def resolve() -> list[str]:
    """The pins with their markers.

    Raises:
        ValueError: there is an address among them.
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
        raise ValueError(f"no pin: {wrong[0]!r}")
    return lines


def with_pins(project: str, pins: list[str]) -> str:
    """The text of pyproject.toml with these pins, which stand at its end."""
    listed = "".join(f"    {json.dumps(pin)},\n" for pin in pins)
    return f"{project.partition(_BEGIN)[0].rstrip()}\n\n{_BEGIN}constraint-dependencies = [\n{listed}]\n"


def main() -> None:
    """Resolve, then write both files."""
    pins = resolve()
    LOCK.write_text(_HEADER + "".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    PROJECT.write_text(with_pins(PROJECT.read_text(encoding="utf-8"), pins), encoding="utf-8")
    print(f"{len(pins)} pins in {LOCK.relative_to(ROOT)} and {PROJECT.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
