#!/usr/bin/env python
"""Write the lock for a machine without GPU: ``python tools/cpu_torch.py LOCK OUT``, by the pip of this Python.

OUT equals LOCK if pip would install a CPU build of torch (pip prefers ``2.13.0+cpu`` to ``2.13.0``). Otherwise OUT has
the newest CPU build that the indexes of pip offer for this Python. If there is none, OUT equals LOCK and standard error
shows what will be downloaded. Used by tools/setup_env.sh; requires only pip.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

TORCH = "torch>=2.6"
"""Requirement as in setup.py."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def _pip(*arguments: str) -> str | None:
    """Run pip and return its standard output, or None if it fails."""
    done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def needs_cuda(requirements: Iterable[str]) -> bool:
    """Return True if the requirements of a torch wheel name NVIDIA libraries for this machine."""
    parsed = [Requirement(text) for text in requirements]
    here = [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return any(name.startswith(("nvidia-", "cuda-")) for name in here)


def takes_cuda(constraints: Path, requirement: str) -> bool | None:
    """Return True if pip would install a CUDA build of torch, or None if it would install none."""
    flags = ["install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-"]
    text = _pip(*flags, "-c", str(constraints), requirement)
    if text is None:
        return None
    (package,) = json.loads(text)["install"]
    return needs_cuda(package["metadata"].get("requires_dist", []))


def newest_cpu_build(requirement: str) -> str | None:
    """Return the newest CPU build that satisfies the requirement, or None."""
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", "torch") or "")
    versions = [Version(text.strip()) for text in listed[1].split(",")] if listed else []
    builds = [v for v in versions if v.local == "cpu" and v in Requirement(requirement).specifier]
    return str(max(builds)) if builds else None


def main(lock: Path, out: Path, requirement: str = TORCH) -> None:
    """Write the lock, and print what a machine without GPU will download needlessly."""
    shutil.copyfile(lock, out)
    if takes_cuda(lock, requirement) is False:
        return
    version = newest_cpu_build(requirement)
    if version is not None:
        pins = lock.read_text(encoding="utf-8").splitlines()
        other_pins = [pin for pin in pins if not re.match(r"(torch|triton)==", pin)]
        out.write_text("\n".join([*other_pins, f"torch=={version}"]) + "\n", encoding="utf-8")
        print(f"no CPU build of the lock's torch for this Python: taking torch {version}", file=sys.stderr)
        return
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(
        f"no index that pip asks offers a CPU build of torch for Python {python}: the build for CUDA is "
        "taken, with NVIDIA's libraries: 2.7 GB that this machine does not use; the environment takes 5.8 GB. To "
        "save them, interrupt this and name an index with CPU builds (PyTorch's installation page has one) in "
        "PIP_EXTRA_INDEX_URL, or wheels in PIP_FIND_LINKS",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
