"""Cost of the proof of a weight sync at the real shapes of Qwen3-30B-A3B and Qwen3-235B-A22B, without a GPU.

    python -m benchmarks.sync_proof [--case 30B-TP2] [--json FILE]

Runs the trainer's own code of the proof over tensors of these shapes whose memory is never touched: the kernel is
replaced by a counter of its launches and of the words that it would read. Counted are launches, bytes, reads from the
device and CPU seconds of rank 0, and launches and reads of a server. *eager* is the form without the kernel, which the
CPU still takes, with a computation for each part and server as it was before. Seconds of a GPU follow from the counts
and the constants below; none was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import orjson
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.digests import _cut, _target_slot  # reaches: timed alone
from megatron_dppo.weights.proof import WeightProofs
from megatron_dppo_engines.server import ServerInfo
from megatron_dppo_engines.serving.vllm_extension import megatron_dppo_digest
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import (
    PartsDigest,
    TensorDigests,
    batched_words,
    words_kernel,
)
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

MEMORY_BANDWIDTH = 3.35e12
"""Bytes per second. H100 SXM data sheet."""
INTEGER_RATE = 132 * 64 * 1.755e9
"""32-bit integer operations per second: 132 multiprocessors, 64 a clock (CUDA programming guide, 9.0), 1.755 GHz."""
EFFICIENCY = 0.7
"""Part of both that a kernel reaches: the assumption of ``megatron-dppo plan``."""
OPERATIONS, STRIDED_OPERATIONS = 39, 57
"""Instructions of the kernel's loop a word, by the machine code for sm_90 (Triton 3.7.1); the second of parts that lie
in runs, such as a column shard."""
LAUNCH_SECONDS = 30e-6
"""Assumed CPU time of a launch from Python, with the copy of its table to the device."""
EAGER_SECONDS = 5e-6
"""Assumed CPU time of an operation of torch."""
READ_SECONDS = 20e-6
"""Assumed CPU time of a read from the device, which waits for it."""
VIEWS = {"view", "as_strided", "slice", "detach", "select", "empty", "_unsafe_view", "unbind", "alias", "reshape"}
"""Operations that start no kernel."""


class Model(NamedTuple):
    """Shapes of a model with experts in all layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    intermediate: int
    vocabulary: int = 151936
    head_dim: int = 128

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes in the order of the stream."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield f"{layer}.self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            for name in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{name}.weight", (self.head_dim,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{name}.weight", (self.hidden,)
            yield f"{layer}.mlp.gate.weight", (self.experts, self.hidden)
            for j in range(self.experts):
                expert = f"{layer}.mlp.experts.{j}"
                yield f"{expert}.gate_proj.weight", (self.intermediate, self.hidden)
                yield f"{expert}.up_proj.weight", (self.intermediate, self.hidden)
                yield f"{expert}.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


QWEN_30B = Model(layers=48, hidden=2048, heads=32, kv_heads=4, experts=128, intermediate=768)
QWEN_235B = Model(layers=94, hidden=4096, heads=64, kv_heads=4, experts=128, intermediate=1536)
CASES = {
    "30B-TP1": (QWEN_30B, 1, 16),
    "30B-TP2": (QWEN_30B, 2, 16),
    "30B-TP2-64": (QWEN_30B, 2, 64),
    "235B-TP8": (QWEN_235B, 8, 32),
}
"""Model, tensor-parallel size and number of the servers."""


@dataclass
class Counts:
    """Counted work of one side of a sync."""

    launches: int = 0
    """Kernels and copies to the device."""
    bytes_read: int = 0
    operations: int = 0
    """Integer operations of the kernels."""
    reads: int = 0
    """Reads of results from the device."""
    cpu_seconds: float = 0.0
    """Measured on this machine, without launches and reads."""

    @property
    def device_seconds(self) -> float:
        """Time of the GPU, by the assumptions above."""
        return max(self.bytes_read / MEMORY_BANDWIDTH, self.operations / INTEGER_RATE) / EFFICIENCY

    @property
    def host_seconds(self) -> float:
        """CPU time of rank 0, or of a server, by the measurement and the assumptions above."""
        return self.cpu_seconds + self.launches * LAUNCH_SECONDS + self.reads * READ_SECONDS


class CountKernels(TorchDispatchMode):
    """Counts operations of torch that start a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.traffic = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] not in VIEWS:
            self.count += 1
            tensors = [t for t in (*args, result) if isinstance(t, Tensor)]
            self.traffic += sum(tensor.nbytes for tensor in tensors)
        return result


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Tensors of all shapes in bf16, in memory that is reserved and never touched."""
    memory = torch.empty(model.vocabulary * model.hidden, dtype=torch.bfloat16)
    for name, shape in model.shapes():
        yield name, memory[: math.prod(shape)].view(shape)


class CountedDevice:
    """Stands for a GPU: counts the launches of the kernel and the words that it would read."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._stack = ExitStack()

    def __enter__(self) -> Counts:
        tolist = Tensor.tolist
        values = batched_words.BatchedWords._values  # reaches: timed alone

        def count_read(tensor: Tensor) -> Any:
            self.counts.reads += 1
            return tolist(tensor)

        def leave_out(batched: batched_words.BatchedWords) -> list[int]:
            start = time.process_time()
            result = values(batched)
            self.counts.cpu_seconds -= time.process_time() - start
            return result

        for patch in (
            # Sums by tile are kernels on a GPU, which are counted; here they are arithmetic.
            mock.patch.object(batched_words.BatchedWords, "_values", leave_out),  # reaches: timed alone
            mock.patch.object(megatron_dppo_digest, "has_kernel", lambda device: True),
            mock.patch.object(words_kernel, "hash_parts", self._launch),
            mock.patch.object(Tensor, "tolist", count_read),
        ):
            self._stack.enter_context(patch)
        return self.counts

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _launch(self, table: Tensor, sums: Tensor, num_fields: int, constants: Any) -> None:
        rows = dict(zip(batched_words._Row._fields, table.numpy().T, strict=True))  # reaches: timed alone
        words = rows["count"] * (rows["end"] - rows["first_program"]) // rows["span"]
        self.counts.launches += 2  # with the copy of the table
        self.counts.bytes_read += int(words.sum()) * 4
        operations = [STRIDED_OPERATIONS if is_strided else OPERATIONS for is_strided in rows["width"] < rows["count"]]
        self.counts.operations += int((words * operations).sum())
        sums.zero_()


class ProvedServer:
    """A server that reports the digests that are expected."""

    def __init__(self, url: str, layout: WeightLayout) -> None:
        self.url = url
        self.layout = layout
        self.body = b""

    async def weight_layout(self) -> WeightLayout:
        """See ``InferenceServer``."""
        return self.layout

    async def weight_digests(self) -> tuple[RankDigests, ...]:
        """Read a response as ``SGLangServer`` does."""
        if not self.body:
            return (RankDigests(tp_rank=0, digests={"model.norm.weight": "0" * 16}),)
        ranks = orjson.loads(self.body)["ranks"]
        return tuple(RankDigests(tp_rank=rank["tp_rank"], digests=rank["checksums"]) for rank in ranks)


def trainer_counts(model: Model, tp_size: int, num_servers: int, *, is_full: bool) -> tuple[Counts, float]:
    """Count what rank 0 does in a sync after the first, and measure the CPU seconds of its judgment of all servers."""
    layout = WeightLayout(algorithm="words", tp_size=tp_size, plain=True)
    servers: list[Any] = [ProvedServer(f"http://s{i}", layout) for i in range(num_servers)]
    info = ServerInfo(
        engine="sglang", engine_version="1", model="m", policy_version=0, max_context=0, world_size=tp_size
    )
    proofs = WeightProofs(model.kv_heads)

    async def sync(*, is_full: bool, counted: bool) -> tuple[Counts, float]:
        attempt = Attempt(0, {})
        attempt.infos = {server.url: info for server in servers}
        with CountedDevice() as counts:
            proof = await proofs.begin(servers, attempt, is_full=is_full)
            start = time.process_time()
            for _ in proof.stream.watch(iter(weights)):
                pass
            counts.cpu_seconds += time.process_time() - start
            with CountKernels() if counted else nullcontext() as kernels:
                start = time.process_time()
                expected = [proof.stream.expected(layout, rank) for rank in range(tp_size)]
                counts.cpu_seconds += 0.0 if counted else time.process_time() - start
            if kernels is not None:
                counts.launches += kernels.count
                counts.bytes_read += kernels.traffic
        report = [
            {"tp_rank": rank, "checksums": {name: e.digest for name, e in names.items()}}
            for rank, names in enumerate(expected)
        ]
        # Without a full proof only the sample is known here; a server reports all names.
        body = orjson.dumps({"ranks": report}) if is_full else bodies[0]
        if is_full:
            bodies[:] = [body]
        for server in servers:
            server.body = body
        start = time.process_time()
        await proof.verify(servers, attempt)
        judged = time.process_time() - start
        assert not attempt.failed and not attempt.notes, (attempt.failed, attempt.notes)
        proofs.record([server.url for server in servers], 0, proof)
        return counts, judged

    bodies: list[bytes] = []
    weights = list(tensors(model))
    asyncio.run(sync(is_full=True, counted=False))
    timed, judged = asyncio.run(sync(is_full=is_full, counted=False))
    counts, _ = asyncio.run(sync(is_full=is_full, counted=True))
    counts.cpu_seconds = timed.cpu_seconds
    return counts, judged


def eager_counts(model: Model, tp_size: int, num_servers: int) -> Counts:
    """Count what the form without the kernel does, where each server's digests are read part by part."""
    counts = Counts()
    cost: dict[int, tuple[int, int, int]] = {}
    for name, shape in model.shapes():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        cut = _cut(tensor, _target_slot(name).shard, tp_size, model.kv_heads)
        assert cut is not None
        if cut.nbytes not in cost:
            parts = PartsDigest("words")
            with CountKernels() as kernels:
                parts.add(0, torch.empty(cut.nbytes, dtype=torch.uint8, device="meta"))
            assert parts._words is not None  # reaches: counts its parts
            cost[cut.nbytes] = kernels.count, kernels.traffic, len(parts._words._tiles)  # reaches: counts its parts
        launches, traffic, reads = cost[cut.nbytes]
        counts.launches += launches * tp_size
        counts.bytes_read += traffic * tp_size
        counts.reads += reads * tp_size * num_servers
    return counts


def server_counts(model: Model, tp_size: int) -> dict[str, Counts]:
    """Count what a rank of a server does once: SGLang's own kernels by their source, and our vLLM extension."""
    targets: dict[str, int] = {}
    for name, tensor in tensors(model):
        slot = _target_slot(name)
        cut = _cut(tensor, slot.shard, tp_size, model.kv_heads)
        assert cut is not None
        targets[slot.target] = targets.get(slot.target, 0) + cut.nbytes
    sglang = Counts(reads=len(targets), bytes_read=sum(targets.values()))
    sglang.operations = sglang.bytes_read // 4 * OPERATIONS
    for size in targets.values():
        values = -(-size // 4 // batched_words.TILE)
        sglang.launches += 1
        # A tree of sums of 1,024 values each.
        while values > 1:
            values = -(-values // 1024)
            sglang.launches += 1
    memory = torch.empty(max(targets.values()), dtype=torch.uint8)
    with CountedDevice() as vllm:
        digests = TensorDigests("words")
        for name, size in targets.items():
            digests.add(name, 0, memory[:size])
        digests.flush()
        with CountKernels() as kernels:
            digests.hexdigests()
        vllm.launches += kernels.count
    return {"sglang": sglang, "vllm": vllm}


def measure(name: str) -> dict[str, Any]:
    """Return all figures of a case."""
    model, tp_size, num_servers = CASES[name]
    full, judged = trainer_counts(model, tp_size, num_servers, is_full=True)
    sample, sample_judged = trainer_counts(model, tp_size, num_servers, is_full=False)
    eager = eager_counts(model, tp_size, num_servers)
    servers = server_counts(model, tp_size)
    served = max(max(c.device_seconds, c.host_seconds) for c in servers.values())
    return {
        "case": name,
        "tensors": sum(1 for _ in model.shapes()),
        "bytes": sum(math.prod(shape) for _, shape in model.shapes()) * 2,
        "full": asdict(full) | {"device_seconds": full.device_seconds, "host_seconds": full.host_seconds},
        "sample": asdict(sample) | {"device_seconds": sample.device_seconds, "host_seconds": sample.host_seconds},
        "eager": asdict(eager),
        "eager_seconds": max(eager.bytes_read / MEMORY_BANDWIDTH / EFFICIENCY, eager.launches * EAGER_SECONDS)
        + eager.reads * READ_SECONDS,
        "servers": {engine: asdict(counts) for engine, counts in servers.items()},
        "server_seconds": served,
        "judge_cpu_seconds": judged,
        "sample_judge_cpu_seconds": sample_judged,
        "seconds": max(full.device_seconds, full.host_seconds) + served + judged,
        "sample_seconds": max(sample.device_seconds, sample.host_seconds) + served + sample_judged,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=[*CASES], action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.case or CASES:
        results.append(result := measure(name))
        print(f"{name}: {result['tensors']} tensors, {result['bytes'] / 2**30:.1f} GiB")
        for kind in ("eager", "full", "sample"):
            c = result[kind]
            print(
                f"  {kind:7} {c['launches']:>9,} launches {c['bytes_read'] / 1e9:>10,.1f} GB {c['reads']:>9,} reads "
                f"{c['cpu_seconds']:6.2f} CPU s"
            )
        for engine, c in result["servers"].items():
            print(
                f"  {engine:7} {c['launches']:>9,} launches {c['bytes_read'] / 1e9:>10,.1f} GB {c['reads']:>9,} reads "
                "a rank"
            )
        print(
            f"  judge {result['judge_cpu_seconds']:.2f} CPU s, of a sample {result['sample_judge_cpu_seconds']:.2f}; "
            f"seconds a sync: eager {result['eager_seconds']:.1f}, full {result['seconds']:.2f}, sample "
            f"{result['sample_seconds']:.2f}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
