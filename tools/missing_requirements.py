"""Print the requirements of this package and of its tests that are not installed; never torch or Megatron.

Used by tools/setup_env.sh inside an environment that must keep its own versions.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import runpy
import sys
from typing import Any
from unittest.mock import patch

KEEP = {"torch", "megatron-core", "transformer-engine"}
# Containers ship triton with their torch, under the name of another distribution.
if importlib.util.find_spec("triton"):
    KEEP.add("triton")


def requirements() -> list[str]:
    """Return the requirements of setup.py, including the extra ``dev``."""
    captured: dict[str, Any] = {}
    with patch("setuptools.setup", captured.update):
        runpy.run_path("setup.py")
    return captured["install_requires"] + captured["extras_require"]["dev"]


def missing() -> list[str]:
    """Return the requirements without any installed version."""
    result = []
    for requirement in requirements():
        name = re.split(r"[<>=!\[ ;]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in KEEP:
                result.append(requirement)
    return result


if __name__ == "__main__":
    sys.stdout.writelines(f"{requirement}\n" for requirement in missing())
