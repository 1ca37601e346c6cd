"""Checkpoints of the distributed optimizer: host memory a parameter, seconds, and who writes how much, by format.

    python benchmarks/checkpoint.py [--ranks 2] [--rounds 3] [--only boxes] [--json FILE]

A model with the shape of Qwen3-30B-A3B in bf16, at two sizes, on ``--ranks`` data-parallel processes. Each round saves
and loads it once in each way, in a new random order; the medians are of the rounds. *boxes* is this package's
(``mcore/optimizer_shards.py``); the others are Megatron's own formats, with its own options. *memory* is by how much a
rank's resident memory grew at its peak, with what its writer processes hold for themselves. *read* is what the load has
asked the file system for, of all ranks together, also a parameter. All ways write to the same disk and none of them
hashes its files; *seconds* are those in which training waits. The weights are on the CPU: from a GPU Megatron's ways,
and *in the background*, copy all that a rank writes (*own share*) to the host first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.host_memory import peak_growth  # noqa: E402
from benchmarks.weight_sync import SHAPE  # noqa: E402

SIZES = [{"num_hidden_layers": 4}, {"num_hidden_layers": 8}]


class Way(NamedTuple):
    """Method of writing a checkpoint."""

    metadata: dict[str, Any]
    """Metadata that Megatron's ``sharded_state_dict`` receives."""
    boxes: bool = False
    parallel: bool = True
    """True if replicas share the writing (``FullyParallelSaveStrategyWrapper``)."""
    background: bool = False
    """True if training continues once the data is copied to host memory."""
    shared_load: bool = False
    """True if one replica reads and sends to the other replicas (``FullyParallelLoadStrategyWrapper``)."""


GATHERED = {"distrib_optim_sharding_type": "fully_reshardable"}
WAYS = {
    "boxes": Way(GATHERED, boxes=True, shared_load=True),
    "boxes, every replica reads all": Way(GATHERED, boxes=True),
    "boxes, in the background": Way(GATHERED, boxes=True, background=True, shared_load=True),
    "fully_reshardable": Way(GATHERED, parallel=False),
    "fully_reshardable, parallel": Way(GATHERED),
    "fully_reshardable, mem_efficient": Way({**GATHERED, "distrib_optim_fully_reshardable_mem_efficient": True}),
    "dp_reshardable": Way({"distrib_optim_sharding_type": "dp_reshardable"}),
}


class Measured(NamedTuple):
    """One save and one load on one rank."""

    save_seconds: float
    """Seconds in which training waits."""
    save_bytes: float
    load_seconds: float
    load_bytes: float
    written: int
    """Bytes of the files that this rank writes."""
    read: int
    """Bytes that the load requests from the file system."""


def build(folder: Path, ranks: int) -> tuple[list[Any], Any]:
    """Build model and optimizer on this rank."""
    from megatron_dppo.config.layout import resolve_parallel
    from megatron_dppo.config.model import ModelConfig, ParallelConfig
    from megatron_dppo.config.optimizer import OptimizerConfig
    from megatron_dppo.hf.folder import model_shape, read_hf_config
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform

    platform = Platform.detect(int(os.environ["LOCAL_RANK"]), force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.mcore.model import build_model, transformer_config
    from megatron_dppo.mcore.optim import Optimizer, wrap_for_training
    from megatron_dppo.mcore.setup import initialize_megatron, start_process_group

    hf_config, parallel = read_hf_config(str(folder)), ParallelConfig()
    layout = resolve_parallel(parallel, ranks, model_shape(hf_config))
    start_process_group(platform, 10.0)
    groups = initialize_megatron(layout, platform, seed=0, timeout_minutes=10.0)
    config = transformer_config(hf_config, ModelConfig(path=str(folder), dtype="bf16"), layout, platform)
    models = build_model(config, hf_config, dist.get_rank(groups.pp), platform.device)
    chunks = wrap_for_training(models, config, parallel, grad_reduce_in_fp32=True)
    return models, Optimizer(chunks, config, OptimizerConfig(lr=1e-6), parallel, 10)


def sharded_state(models: list[Any], optimizer: Any, way: Way, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state dict that Megatron writes or loads into."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_dppo.mcore.optimizer_shards import use_box_sharding

    for part in optimizer.megatron.chained_optimizers:
        if not isinstance(part, DistributedOptimizer):
            raise SystemExit("this compares formats of the distributed optimizer; use --ranks 2 or more")
        use_box_sharding(part)
        if not way.boxes:
            del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable
    metadata = {**way.metadata, "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {"model": models[0].sharded_state_dict(metadata=dict(metadata))}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=dict(metadata))
    return state


def measure(models: list[Any], optimizer: Any, way: Way, folder: Path) -> Measured:
    """Save, then load what was saved."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from megatron_dppo.mcore.checkpoint.format import StreamedSave

    blocked = 0.0

    def save() -> None:
        nonlocal blocked
        start = time.perf_counter()
        strategy = StreamedSave(None, staged=way.background) if way.boxes else get_default_save_sharded_strategy()
        strategy = FullyParallelSaveStrategyWrapper(strategy) if way.parallel else strategy
        state = sharded_state(models, optimizer, way, False)
        async_request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=way.boxes)
        blocked = time.perf_counter() - start
        if async_request is not None:
            async_request.async_fn()
            on_all_ranks(lambda: save_config(CheckpointingConfig("torch_dist", 1), str(folder)), first_only=True)
            blocked = blocked if way.background else time.perf_counter() - start

    def load() -> None:
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()) if way.shared_load else None
        loaded = dist_checkpointing.load(sharded_state(models, optimizer, way, True), str(folder), strategy)
        models[0].load_state_dict(loaded["model"])
        optimizer.megatron.load_state_dict(loaded["optimizer"])

    on_all_ranks(lambda: folder.mkdir(), first_only=True)
    _, save_bytes = peak_growth(save, children=True)
    dist.barrier()
    written = sum(file.stat().st_size for file in folder.glob(f"__{dist.get_rank()}_*"))
    before = bytes_read()
    loaded = peak_growth(load, children=True)
    read = bytes_read() - before
    dist.barrier()
    on_all_ranks(lambda: shutil.rmtree(folder), first_only=True)
    return Measured(blocked, save_bytes, *loaded, written, read)


def bytes_read() -> int:
    """Return the bytes that this process has read so far, including the page cache."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def on_all_ranks(work: Callable[[], None], *, first_only: bool) -> None:
    """Run the work on rank 0 (or on all ranks) and wait for it."""
    if dist.get_rank() == 0 or not first_only:
        work()
    dist.barrier()


def worker(folder: Path, rounds: int, ways: list[str]) -> None:
    """Measure every method on one rank, in the same order on all ranks."""
    models, optimizer = build(folder, int(os.environ["WORLD_SIZE"]))
    measured_ways: dict[str, list[Measured]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(ways, len(ways)):
            result = measure(models, optimizer, WAYS[name], folder / "checkpoint")
            if number:  # the first round warms up
                measured_ways[name].append(result)
    parameters = sum(p.numel() for model in models for p in model.parameters())
    out = folder / f"rank{dist.get_rank()}.json"
    out.write_text(json.dumps({"parameters": parameters, "ways": measured_ways}))
    dist.barrier()
    dist.destroy_process_group()


def run(size: dict[str, int], ranks: int, rounds: int, only: str) -> list[dict[str, Any]]:
    """Measure one size and return the records of each rank."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "config.json").write_text(json.dumps({**SHAPE, **size}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command += [__file__, "--rounds", str(rounds), "--only", only, "--worker", folder_name]
        subprocess.run(command, check=True, env=environment)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def report(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the table of one size and return its rows."""
    parameters = by_rank[0]["parameters"]
    print(f"\n{parameters / 1e6:.1f} M parameters on each of {len(by_rank)} data-parallel ranks")
    print(f"{'way':<34} {'host bytes a parameter, by rank':<36} {'own share':<14} {'read':<6} {'seconds':<14} of boxes")
    print(f"{'':<34} {'save':<18}{'load':<18} {'by rank':<14} {'by all':<6} {'save':<7}{'load':<7} {'save':<6}load")
    rows: list[dict[str, Any]] = []
    for name in by_rank[0]["ways"]:
        medians = [[statistics.median(column) for column in zip(*rank["ways"][name], strict=True)] for rank in by_rank]
        row = {
            "way": name,
            "parameters": parameters,
            "save_bytes": [m[1] / parameters for m in medians],
            "load_bytes": [m[3] / parameters for m in medians],
            "written": [m[4] / parameters for m in medians],
            "read_by_all": sum(m[5] for m in medians) / parameters,
            "save_seconds": max(m[0] for m in medians),
            "load_seconds": max(m[2] for m in medians),
        }
        rows.append(row)
        first = rows[0]
        print(
            f"{name:<34} {_by_rank(row['save_bytes']):<18}{_by_rank(row['load_bytes']):<18} "
            f"{_by_rank(row['written']):<14} {row['read_by_all']:<6.1f} "
            f"{row['save_seconds']:<7.2f}{row['load_seconds']:<7.2f} "
            f"{row['save_seconds'] / first['save_seconds']:<6.2f}{row['load_seconds'] / first['load_seconds']:.2f}"
        )
    return rows


def _by_rank(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def main() -> int:
    """Measure both sizes and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose names begin so")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(Path(options.worker), options.rounds, [name for name in WAYS if name.startswith(options.only)])
        return 0
    rows = [row for size in SIZES for row in report(run(size, options.ranks, options.rounds, options.only))]
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
