"""Examples that ``megatron-dppo examples`` can run: build the model, train, write the report."""

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
from megatron_dppo_lab.smollm2 import mixture_folder, model_folder

MODELS = Path("runs/models")
"""Folder of links to the models, named as in the configurations of the examples."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
"""Defaults for the environment of the training processes."""
_BF16_SPEEDUP = 1.3
"""Smallest speedup of bf16 products over fp32 ones at which training in bf16 is faster."""


@dataclass(frozen=True)
class RunnableExample:
    """An example that includes a model."""

    files: str
    """Folder in ``examples/``."""
    config: str
    make_model: Callable[[int], Path]
    """Function of the run's seed that returns the model's folder. The first call builds the model."""
    processes: int = 2
    """Training processes unless the command line has another number."""
    is_bf16: bool = False
    """True if the configuration trains in bf16."""


def _base(task: str) -> Callable[[int], Path]:
    """Return the function that makes the base model of an embedded task."""

    def make(seed: int) -> Path:
        from megatron_dppo_lab.base_model import create_base

        folder = MODELS / f"{task}-{seed}"
        if not folder.exists():
            create_base(f"task:{task}", folder, [f"--run.seed={seed}"])
        return folder

    return make


RUNNABLE: Mapping[str, RunnableExample] = {
    "rare_chain": RunnableExample("rare_words", "chain.toml", _base("rare_chain"), processes=1),
    "rare_words": RunnableExample("rare_words", "words.toml", _base("rare_words"), processes=1),
    "smollm2": RunnableExample("smollm2", "dppo.toml", lambda _: model_folder(_print), is_bf16=True),
    "smollm2-moe": RunnableExample("smollm2", "moe.toml", lambda _: mixture_folder(_print), is_bf16=True),
}


def run_example(
    name: str, files: Path, *, output: Path, processes: int | None, seed: int, overrides: Sequence[str]
) -> int:
    """Build the model, train, write the report.

    An earlier run in ``output`` is moved to ``old/``. ``processes`` None uses the example's number. Return the exit
    code of the training.
    """
    example = RUNNABLE[name]
    start_time = time.perf_counter()
    # torchrun would hide the message of the training processes behind its own traceback.
    require_extra("examples")
    model = example.make_model(seed)
    processes = processes or example.processes
    link_model(model, MODELS / name)
    settings = ["--run.output_dir", str(output), "--run.overwrite", "true", "--run.seed", str(seed)]
    if example.is_bf16 and not has_fast_bf16():
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


def has_fast_bf16() -> bool:
    """Return True if bf16 products are faster than fp32 ones: always with CUDA, measured on a CPU."""
    import torch

    if torch.cuda.is_available():
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        # The sizes of an MLP of SmolLM2-135M.
        left = torch.ones(512, 576, dtype=dtype)
        right = torch.ones(576, 1536, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            torch.mm(left, right)
            # The fastest of five: other processes only ever make a product slower.
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    return seconds[torch.float32] > _BF16_SPEEDUP * seconds[torch.bfloat16]
