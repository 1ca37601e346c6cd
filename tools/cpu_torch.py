#!/usr/bin/env python
"""Write the lock for a machine without GPU: ``python tools/cpu_torch.py LOCK OUT``, by the pip of this Python.

OUT is LOCK when pip would take a CPU build of torch, as it prefers ``2.13.0+cpu`` to ``2.13.0``. Else it has the newest
CPU build that pip's indexes offer for this Python in the place of the lock's torch. Else it is LOCK, and standard error
says what will be downloaded. Used by tools/setup_env.sh; needs nothing but pip.
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
"""as setup.py asks for it"""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def _pip(*arguments: str) -> str | None:
    """What pip prints; None = it failed."""
    done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def needs_cuda(requirements: Iterable[str]) -> bool:
    """Whether the requirements of a wheel of torch name NVIDIA's libraries for this machine."""
    parsed = [Requirement(text) for text in requirements]
    here = [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return any(name.startswith(("nvidia-", "cuda-")) for name in here)


def takes_cuda(constraints: Path, requirement: str) -> bool | None:
    """Whether the torch that pip would install is a CUDA build; None = it would install none."""
    flags = ["install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-"]
    text = _pip(*flags, "-c", str(constraints), requirement)
    if text is None:
        return None
    (found,) = json.loads(text)["install"]
    return needs_cuda(found["metadata"].get("requires_dist", []))


def newest_cpu_build(requirement: str) -> str | None:
    """The newest version that calls itself a CPU build, of those that the requirement takes."""
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", "torch") or "")
    versions = [Version(text.strip()) for text in listed[1].split(",")] if listed else []
    builds = [v for v in versions if v.local == "cpu" and v in Requirement(requirement).specifier]
    return str(max(builds)) if builds else None


def main(lock: Path, out: Path, requirement: str = TORCH) -> None:
    """Choose, and say what is not as a machine without GPU would have it."""
    shutil.copyfile(lock, out)
    if takes_cuda(lock, requirement) is False:
        return
    version = newest_cpu_build(requirement)
    if version is not None:
        pins = lock.read_text(encoding="utf-8").splitlines()
        rest = [pin for pin in pins if not re.match(r"(torch|triton)==", pin)]
        out.write_text("\n".join([*rest, f"torch=={version}"]) + "\n", encoding="utf-8")
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
