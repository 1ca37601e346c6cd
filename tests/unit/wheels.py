"""Other versions of packages, from the package registry."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked(requirement: str, folder: Path) -> Path:
    """The wheel's files, for whatever Python it is made."""
    flags = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *flags, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.fail(f"the package registry gave no {requirement}, which this test stands on:\n{done.stderr[-2000:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
