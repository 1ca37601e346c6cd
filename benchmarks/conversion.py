"""Hugging Face folders in and out of a Megatron model: host memory and seconds, by who writes the files.

    python benchmarks/conversion.py [--ranks 2] [--rounds 3] [--json FILE]

All 18,867 tensors of Qwen3-30B-A3B (48 layers, 128 experts) under their names, at two sizes far below the real ones, on
``--ranks`` expert-parallel processes; files as large a part of the model as 5 GiB are of its 57. Each round reads the
folder once and writes it in each way, in a new random order; the medians are of the rounds. *memory* is by how much
what a rank holds for itself grew at its peak, without pages of the files that the kernel keeps.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.host_memory import peak_growth  # noqa: E402
from benchmarks.weight_sync import SHAPE  # noqa: E402

REAL = {**SHAPE, "num_hidden_layers": 48, "num_experts": 128, "vocab_size": 16384}
SIZES = [{"hidden_size": 64, "moe_intermediate_size": 32}, {"hidden_size": 128, "moe_intermediate_size": 64}]
FILES = 12
WAYS = ("all ranks write", "rank 0 writes")


def write_source(folder: Path) -> None:
    """Write the source folder with random weights."""
    from megatron_dppo.export.hf_folder import save_hf_folder
    from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model

    model = build_hf_model(read_hf_config(folder / "shape"), torch.bfloat16, seed=0)
    size = sum(parameter.nbytes for parameter in model.parameters())
    save_hf_folder(
        folder / "source", folder / "shape", stream_model(model), torch.bfloat16, max_shard_bytes=size // FILES
    )


def worker(folder: Path, rounds: int) -> None:
    """Read and write on one rank, and write its measurements to the folder."""
    from megatron_dppo.config.model import ParallelConfig
    from megatron_dppo.export.hf_folder import save_hf_folder
    from megatron_dppo.hf.folder import drain
    from megatron_dppo.hf.weight_files import FolderWeights
    from megatron_dppo.run.conversion import open_converter

    source = folder / "source"
    parallel = ParallelConfig(expert_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    measured_ways: dict[str, list[tuple[float, float]]] = {name: [] for name in ("read", *WAYS)}
    with open_converter(str(source), parallel, "bf16") as converter:
        target = folder / "target"

        def write(way: str) -> None:
            weights, limit = converter.bridge.export(), size // FILES
            if way == WAYS[0]:
                save_hf_folder(target, source, weights, torch.bfloat16, group=dist.group.WORLD, max_shard_bytes=limit)
            elif dist.get_rank() == 0:
                save_hf_folder(target, source, weights, torch.bfloat16, max_shard_bytes=limit)
            else:
                drain(weights)
            dist.barrier()

        order = random.Random(0)
        for _ in range(rounds):
            dist.barrier()
            measured_ways["read"].append(
                peak_growth(lambda: converter.bridge.load(FolderWeights(source)), anonymous_only=True)
            )
            for way in order.sample(WAYS, len(WAYS)):
                dist.barrier()
                measured_ways[way].append(peak_growth(lambda way=way: write(way), anonymous_only=True))  # type: ignore[misc]
                _check(target, source)
                if dist.get_rank() == 0:
                    shutil.rmtree(target)
        parameter_bytes = sum(parameter.nbytes for model in converter.models for parameter in model.parameters())
        result = {
            "bytes": size,
            "mine": parameter_bytes,
            "names": len(FolderWeights(source).names()),
            "ways": measured_ways,
        }
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))


def _check(target: Path, source: Path) -> None:
    """Compare this rank's share of the tensors bit by bit."""
    from megatron_dppo.hf.weight_files import FolderWeights

    written, read = FolderWeights(target), FolderWeights(source)
    if written.names() != read.names():
        raise SystemExit("the folder that was written has other names")
    for name in sorted(read.names())[dist.get_rank() :: dist.get_world_size()]:
        if not torch.equal(written[name], read[name]):
            raise SystemExit(f"{name} differs")
    dist.barrier()


def run(size: dict[str, int], ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one size and return the records of each rank."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "shape").mkdir()
        (folder / "shape/config.json").write_text(json.dumps({**REAL, **size}))
        write_source(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command += [__file__, "--rounds", str(rounds), "--worker", folder_name]
        subprocess.run(command, check=True, env=environment)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def report(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the table of one size and return its rows."""
    size = by_rank[0]["bytes"]
    print(f"\n{by_rank[0]['names']} tensors, {size / 2**20:.0f} MiB in {FILES} files, {len(by_rank)} ranks")
    print(f"{'way':<18} {'memory, MiB by rank':<24} {'of a file, by rank':<22} {'seconds':<9} of the first way")
    rows: list[dict[str, Any]] = []
    for name in ("read", *WAYS):
        medians = [[statistics.median(column) for column in zip(*rank["ways"][name], strict=True)] for rank in by_rank]
        row = {"way": name, "bytes": size, "memory": [m[1] for m in medians], "seconds": max(m[0] for m in medians)}
        rows.append(row)
        ratio = f"{row['seconds'] / rows[1]['seconds']:.2f}" if len(rows) > 1 else ""
        memory = " / ".join(f"{value / 2**20:.0f}" for value in row["memory"])
        files = " / ".join(f"{value * FILES / size:.2f}" for value in row["memory"])
        print(f"{name:<18} {memory:<24} {files:<22} {row['seconds']:<9.2f} {ratio}")
    return rows


def main() -> int:
    """Measure both sizes and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(Path(options.worker), options.rounds)
        return 0
    rows = [row for size in SIZES for row in report(run(size, options.ranks, options.rounds))]
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
