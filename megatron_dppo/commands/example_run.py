"""Examples that ``megatron-dppo examples`` also runs: a real model, training on two processes, the report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.files import disk_errors

MODELS = Path("runs/models")
"""Folder of links to the models, by the names that the examples' configurations have."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
"""For the processes that train, where the user has not set them."""


@dataclass(frozen=True)
class RunnableExample:
    """An example with a model of its own."""

    files: str
    """Folder in ``examples/``."""
    config: str
    """Its configuration in that folder."""
    make_model: Callable[[], Path]
    """Returns the model's folder in the cache; the first call makes it."""


def _smollm2() -> Path:
    from megatron_dppo.commands.experiments.smollm2 import model_folder

    return model_folder(_say)


def _smollm2_moe() -> Path:
    """Upcycle SmolLM2 to four experts, two for each token."""
    from megatron_dppo.weights.upcycled_config import Upcycling
    from megatron_dppo.weights.upcycling import upcycle_folder

    dense = _smollm2()
    folder = dense.with_name(f"{dense.name}-moe-4x2")
    if not folder.is_dir():
        _say("model    upcycling it to 4 experts (377 M parameters)")
        upcycle_folder(dense, folder, Upcycling(num_experts=4, top_k=2, noise=0.02))
    return folder


RUNNABLE: Mapping[str, RunnableExample] = {
    "smollm2": RunnableExample("smollm2", "dppo.toml", _smollm2),
    "smollm2-moe": RunnableExample("smollm2", "moe.toml", _smollm2_moe),
}
"""Name on the command line -> example."""


def run_example(name: str, files: Path, *, output: Path, processes: int, seed: int, overrides: Sequence[str]) -> int:
    """Make the model, train, write the report.

    Args:
        name: a key of ``RUNNABLE``.
        files: folder with the example's configuration, data and reward.
        output: folder of the run; an earlier run in it is moved to ``old/``.
        processes: training processes on this machine.
        seed: ``run.seed``.
        overrides: further ``--section.key VALUE``.

    Returns:
        The exit code of the training.

    Raises:
        UserError: the model cannot be made.
    """
    from megatron_dppo.parallel.platform import has_fast_bf16  # imports torch, which other commands do without

    example = RUNNABLE[name]
    began = time.perf_counter()
    _link(example.make_model(), MODELS / name)
    settings = ["--run.output_dir", str(output), "--run.overwrite", "true", "--run.seed", str(seed)]
    if not has_fast_bf16():
        _say("model    bf16 products are not faster on this processor: training in fp32, about twice as long")
        settings += ["--model.dtype", "fp32", "--rollout.dtype", "fp32"]
    if importlib.util.find_spec("pyarrow") is not None:
        settings += ["--log.rollouts_every", "4"]  # single tokens for the report
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "megatron_dppo.train", str(files / example.config), *settings, *overrides]
    environment = _ENVIRONMENT | os.environ
    _say(f"training {files / example.config} on {processes} processes, into {output}")
    code = subprocess.run(command, env=environment).returncode
    if code == 0:
        report = [sys.executable, "-m", "megatron_dppo.commands.main", "report", str(output)]
        code = subprocess.run(report, env=environment).returncode
        _say(f"done     in {(time.perf_counter() - began) / 60:.1f} minutes")
    return code


def _say(line: str) -> None:
    print(line, flush=True)


def _link(model: Path, link: Path) -> None:
    """Let ``link`` lead to the model, where nothing of the user's is in its place."""
    if link.resolve() == model.resolve():
        return
    # An earlier version's link leads to its neighbour in the cache, or to nothing after the cache was emptied.
    if link.is_symlink() and (not link.exists() or link.resolve().parent == model.resolve().parent):
        link.unlink()
    if link.exists():
        _say(f"model    {link} is there already and is used as it is")
        return
    with disk_errors(link, "the link to the model"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(model.resolve(), target_is_directory=True)
