"""The GPUs of this machine, without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them; empty = none."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA stops at the first entry that is no device; -1 is the usual one.
        parts = [part.strip() for part in named.split(",") if part.strip()]
        return parts[: parts.index("-1")] if "-1" in parts else parts
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()
