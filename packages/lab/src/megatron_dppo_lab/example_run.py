"""Examples that ``megatron-dppo examples`` can run: build the model, train, write the report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.commands.extras import require_extra
from megatron_dppo.files import disk_errors

MODELS = Path("runs/models")
"""Folder of links to the models, named as in the configurations of the examples."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
"""Defaults for the environment of the training processes."""


@dataclass(frozen=True)
class RunnableExample:
    """An example that includes a model."""

    files: str
    """Folder in ``examples/``."""
    config: str
    """Configuration file in that folder."""
    make_model: Callable[[], Path]
    """Function that returns the model's folder in the cache. The first call builds the model."""


def _smollm2() -> Path:
    from megatron_dppo_lab.smollm2 import model_folder

    return model_folder(_print)


def _smollm2_moe() -> Path:
    from megatron_dppo_lab.smollm2 import mixture_folder

    return mixture_folder(_print)


RUNNABLE: Mapping[str, RunnableExample] = {
    "smollm2": RunnableExample("smollm2", "dppo.toml", _smollm2),
    "smollm2-moe": RunnableExample("smollm2", "moe.toml", _smollm2_moe),
}
"""Runnable examples by the name on the command line."""


def run_example(name: str, files: Path, *, output: Path, processes: int, seed: int, overrides: Sequence[str]) -> int:
    """Build the model, train, write the report.

    Args:
        name: Key of ``RUNNABLE``.
        files: Folder with the example's configuration, data and reward.
        output: Folder of the run. An earlier run in it is moved to ``old/``.
        processes: Training processes on this machine.
        seed: Value of ``run.seed``.
        overrides: Further ``--section.key VALUE``.

    Returns:
        The exit code of the training.

    Raises:
        UserError: The model cannot be built, or the extra ``train`` is not installed.
    """
    from megatron_dppo_lab.fast_bf16 import has_fast_bf16  # Imports torch, which the listing does not need.

    example = RUNNABLE[name]
    start_time = time.perf_counter()
    model = example.make_model()
    # torchrun would hide the message of the training processes behind its own traceback.
    require_extra("examples")
    link_model(model, MODELS / name)
    settings = ["--run.output_dir", str(output), "--run.overwrite", "true", "--run.seed", str(seed)]
    if not has_fast_bf16():
        _print("model    bf16 is not faster on this CPU: training in fp32, about twice as long")
        settings += ["--model.dtype", "fp32", "--rollout.dtype", "fp32"]
    if importlib.util.find_spec("pyarrow") is not None:
        # Recorded rollouts give the report its single tokens.
        settings += ["--log.rollouts_every", "4"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "megatron_dppo.train", str(files / example.config), *settings, *overrides]
    # The user's own variables win.
    environment = _ENVIRONMENT | os.environ
    _print(f"training {files / example.config} on {processes} processes, into {output}")
    code = subprocess.run(command, env=environment).returncode
    if code == 0:
        report = [sys.executable, "-m", "megatron_dppo.commands.main", "report", str(output)]
        code = subprocess.run(report, env=environment).returncode
        _print(f"done     in {(time.perf_counter() - start_time) / 60:.1f} minutes")
    return code


def _print(line: str) -> None:
    print(line, flush=True)


def link_model(model: Path, link: Path) -> None:
    """Point ``link`` to the model, unless the user has put something else there."""
    if link.resolve() == model.resolve():
        return
    # Replace a link of an earlier version: it points to another folder of the cache, or is dangling after the cache was
    # cleared.
    if link.is_symlink() and (not link.exists() or link.resolve().parent == model.resolve().parent):
        link.unlink()
    if link.exists():
        _print(f"model    {link} exists and is used unchanged")
        return
    with disk_errors(link, "the link to the model"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(model.resolve(), target_is_directory=True)
