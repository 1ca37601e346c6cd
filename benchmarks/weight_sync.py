"""Weights from a trainer to a real inference server: bytes, seconds and peak memory by method and bucket size.

    python benchmarks/weight_sync.py [--ranks 2] [--rounds 3] [--json FILE]

Starts SGLang on this machine (tools/engines/sglang.sh) with a random model that has the shape of Qwen3-30B-A3B at a
smaller scale, and a trainer of ``--ranks`` processes that holds its experts in shards. A round sends all weights once
with each method and bucket size, in a new random order; the medians are of the rounds. *gather* is the same stream of
weights sent nowhere: what Megatron's shards cost. *proved* is with the proof that the server holds what was sent
(``checksum_every = 1``). *memory* is by how much the sending rank's resident memory grew. *serial* is ``distributed``
without overlap: a bucket is gathered when the one before has been loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.host_memory import peak_growth  # noqa: E402
from megatron_dppo.weights import transfer  # noqa: E402

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Qwen3-30B-A3B is 48 layers, 128 experts, hidden size 2048, vocabulary 151,936."""
FULL_BYTES = 30.53e9 * 2
"""Qwen3-30B-A3B in bf16"""
SIZES = [("disk", 512), ("ipc", 16), ("ipc", 128)]
SIZES += [("distributed", 16), ("distributed", 64), ("distributed", 512)]
PROVED = [("disk", 512), ("ipc", 128), ("distributed", 64), ("distributed", 512)]
SERIAL = [("serial", 16), ("serial", 64)]
"""``distributed`` as it would be without overlap"""
WAYS = [(*way, False) for way in [*SIZES, *SERIAL]] + [(*way, True) for way in PROVED]
GATHER = ("gather", 0, False)


class OneAfterAnother(transfer.Buckets):
    """Gathers a bucket when the one before has been loaded, and not while it is sent."""

    async def __anext__(self) -> transfer.Tensors:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            await asyncio.wait(pending)
        return await super().__anext__()


def build_bridge(folder: Path, ranks: int) -> Any:
    """Build the policy on this rank's shards, with experts over all ranks."""
    from megatron_dppo.config.layout import resolve_parallel
    from megatron_dppo.config.model import ModelConfig, ParallelConfig
    from megatron_dppo.hf.folder import model_shape, read_hf_config
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform

    platform = Platform.detect(int(os.environ.get("LOCAL_RANK", "0")))
    apply_shims(platform)
    from megatron_dppo.mcore.bridge import Bridge
    from megatron_dppo.mcore.model import build_model, transformer_config
    from megatron_dppo.mcore.setup import initialize_megatron, start_process_group

    hf_config = read_hf_config(str(folder))
    layout = resolve_parallel(ParallelConfig(expert_model_parallel_size=ranks), ranks, model_shape(hf_config))
    start_process_group(platform, 10.0)
    groups = initialize_megatron(layout, platform, seed=0, timeout_minutes=10.0)
    config = transformer_config(hf_config, ModelConfig(path=str(folder), dtype="bf16"), layout, platform)
    models = build_model(config, hf_config, dist.get_rank(groups.pp), platform.device)
    return Bridge(models, model_shape(hf_config), tied=False, groups=groups)


def worker(folder: Path, url: str, rounds: int, out: Path) -> None:
    """One rank: send by every way, in the same order on all ranks."""
    from megatron_dppo.config.servers import WeightSyncConfig
    from megatron_dppo.hf.folder import drain
    from megatron_dppo.weights.ipc import MemorySharing
    from megatron_dppo.weights.sync import WeightSync
    from megatron_dppo_engines.sglang import SGLangServer

    ranks = int(os.environ["WORLD_SIZE"])
    bridge = build_bridge(folder, ranks)
    sender = dist.get_rank() == 0
    syncs: dict[tuple[str, int, bool], Any] = {}
    sharing = {
        way: MemorySharing({url: [0]}, way[1] * 2**20, torch.bfloat16, tied=False, group=dist.group.WORLD)
        for way in WAYS
        if way[0] == "ipc"
    }
    for method, megabytes, proved in WAYS if sender else []:
        sizes: dict[str, Any] = {"bucket_megabytes": megabytes, "checksum_every": int(proved)}
        config = WeightSyncConfig(method="distributed" if method == "serial" else method, **sizes)  # type: ignore[arg-type]
        syncs[method, megabytes, proved] = WeightSync(
            [SGLangServer(url)],
            config,
            model_folder=folder,
            weights_folder=out.parent / "weights",
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            sharing=sharing.get((method, megabytes, proved)),
        )
    measured_ways: dict[str, list[tuple[float, float]]] = {}
    order = random.Random(0)
    for version in range(rounds + 1):
        for way in order.sample([*WAYS, GATHER], len(WAYS) + 1):

            def send(way: tuple[str, int, bool] = way, version: int = version) -> None:
                if not sender and way in sharing:
                    return sharing[way].open(bridge.export()).run()
                if not sender or way == GATHER:
                    return drain(bridge.export())
                with mock.patch.object(
                    transfer, "Buckets", OneAfterAnother if way[0] == "serial" else transfer.Buckets
                ):
                    result = syncs[way].send(bridge.export(), version)
                assert result.good and not result.notes, result

            dist.barrier()
            measured = peak_growth(send)
            if version:  # the first round opens groups and warms up
                measured_ways.setdefault(f"{way[0]} {way[1]} {way[2]}", []).append(measured)
    if sender:
        size = sum(t.numel() for _, t in bridge.export()) * 2
        out.write_text(json.dumps({"bytes": size, "ways": measured_ways}))
        for sync in syncs.values():
            sync.close()
    else:
        drain(bridge.export())
    dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Print the table; the rows."""
    size = result["bytes"]
    gather = statistics.median(seconds for seconds, _ in result["ways"]["gather 0 False"])
    print(f"{size / 2**20:.0f} MiB in bf16 from {ranks} ranks; Qwen3-30B-A3B has {FULL_BYTES / size:.0f} times that")
    print(f"{'method':<12} {'bucket MiB':>10} proved {'seconds':>16} {'of gather':>9} {'MiB/s':>7} {'memory MiB':>11}")
    rows = []
    for way, measured in sorted(result["ways"].items()):
        method, megabytes, proved = way.split()
        seconds = sorted(s for s, _ in measured)
        middle, memory = statistics.median(seconds), statistics.median(m for _, m in measured)
        spread = f"{middle:.2f} ({seconds[0]:.2f}..{seconds[-1]:.2f})"
        mark = "yes" if proved == "True" else ""
        key = {"method": method, "bucket_mib": int(megabytes), "proved": proved == "True"}
        rows.append({**key, "seconds": middle, "memory_bytes": memory})
        print(
            f"{method:<12} {megabytes if int(megabytes) else '':>10} {mark:<6} {spread:>16} "
            f"{middle / gather:>9.2f} {size / 2**20 / middle:>7.0f} {memory / 2**20:>11.0f}"
        )
    for _, megabytes in SERIAL:
        ratios = overlap(result["ways"], megabytes)
        rows.append({"method": "distributed over serial", "bucket_mib": megabytes, "ratio": statistics.median(ratios)})
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        print(f"with overlap : one after another, buckets of {megabytes} MiB: {spread} of the seconds, by round")
    return rows


def overlap(ways: dict[str, Any], megabytes: int) -> list[float]:
    """Seconds of ``distributed`` over those without overlap, of each round."""
    pair = zip(ways[f"distributed {megabytes} False"], ways[f"serial {megabytes} False"], strict=True)
    return [ours / serial for (ours, _), (serial, _) in pair]


def main() -> int:
    """Start the server and the trainer; print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "URL", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, url, out = options.worker
        worker(Path(folder), url, options.rounds, Path(out))
        return 0
    from tests.engines.servers import start_sglang, stop_engine, wait_ready

    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary) / "model", Path(temporary) / "result.json"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE))
        flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16"]
        server = start_sglang(folder, Path(temporary) / "server.log", *flags)
        try:
            wait_ready(server)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(options.ranks), __file__, "--rounds", str(options.rounds), "--worker"]
            environment = {
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            subprocess.run([*command, str(folder), server.url, str(out)], check=True, env=environment)
        finally:
            stop_engine(server)
        result = json.loads(out.read_text())
    rows = report(result, options.ranks)
    if options.json:
        options.json.write_text(json.dumps({"bytes": result["bytes"], "ranks": options.ranks, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
