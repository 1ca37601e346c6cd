"""A look at a folder of weights before a server is asked to load it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_dppo.errors import CheckpointError


def check_weights(folder: Path) -> None:
    """Refuse weights that a server would make damage with.

    Of a file that breaks off SGLang dies: its way back reads the same folder again. Missing files it does not notice.
    A stock vLLM is left without weights, and dies of the next request. A folder that is not on this machine passes.

    Raises:
        CheckpointError: a file is missing or breaks off.
    """
    if not folder.is_dir():
        return  # a path of the server's machine: it says itself that there is nothing
    index = folder / "model.safetensors.index.json"
    files = set(folder.glob("*.safetensors"))
    if index.is_file():
        files |= {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error
