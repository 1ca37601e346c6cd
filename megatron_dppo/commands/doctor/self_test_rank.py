"""One process of the self-test.

Started as ``python -m megatron_dppo.commands.doctor.self_test_rank FOLDER``, with RANK and WORLD_SIZE set.

Rank 0 writes what was found to ``FOLDER/checks.jsonl``, a line as soon as it is known.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.commands.doctor.self_test import SelfTestResult
from megatron_dppo.head import row_kernels
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import LossNeeds

TOKENS, HIDDEN, VOCABULARY, K, TEMPERATURE = 96, 64, 1003, 8, 0.7
_LARGE = 64 * 2**20
"""numbers of the all-reduce that is timed: 256 MiB"""


def main() -> None:
    """Join the others, run the checks."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    platform = Platform.detect(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    # float64 is compared with: TF32 would be 1,000 times further away.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    report = None if rank else (folder / "checks.jsonl").open("a")
    for check in _all(platform):
        value = float("inf") if math.isnan(check.value) else check.value
        worst = torch.tensor(value, dtype=torch.float64, device=platform.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MIN if check.bound is None else dist.ReduceOp.MAX)
        if report is not None:
            found = replace(check, value=float(worst))
            print(json.dumps(asdict(found)), file=report, flush=True)
    dist.destroy_process_group()


def _all(platform: Platform) -> Iterator[SelfTestResult]:
    yield from collectives(platform)
    yield from head(platform)
    from megatron_dppo.mcore.compat.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo.commands.doctor.self_test_model import model

    yield from model(platform)


def collectives(platform: Platform) -> Iterator[SelfTestResult]:
    """Each kind that training uses, on numbers whose results are whole: what differs from them is wrong."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), platform.device
    own = torch.full((1000,), float(rank + 1), device=device)
    summed = own.clone()
    dist.all_reduce(summed)
    yield _exact("all-reduce", summed, torch.full((1000,), world * (world + 1) / 2))
    gathered = own.new_empty(world * 1000)
    dist.all_gather_into_tensor(gathered, own)
    yield _exact("all-gather", gathered, torch.arange(1.0, world + 1).repeat_interleave(1000))
    scattered = own.new_empty(1000)
    dist.reduce_scatter_tensor(scattered, gathered * (rank + 1))
    yield _exact("reduce-scatter", scattered, torch.full((1000,), (rank + 1) * world * (world + 1) / 2))
    splits = list(range(1, world + 1))  # to rank j go j + 1 rows
    sent = torch.cat([torch.full((n, 8), 100.0 * rank + n, device=device) for n in splits])
    arrived = sent.new_empty(world * (rank + 1), 8)
    dist.all_to_all_single(arrived, sent, [rank + 1] * world, splits)
    sources = torch.arange(world).repeat_interleave(rank + 1)
    yield _exact("all-to-all of uneven parts", arrived, (100.0 * sources + rank + 1)[:, None].expand(-1, 8))
    told = own.clone()
    dist.broadcast(told, world - 1)
    yield _exact("broadcast", told, torch.full((1000,), float(world)))
    yield from _neighbours(own)
    if platform.is_cuda:
        yield SelfTestResult("all-reduce of 256 MiB, GB/s of each link", _bandwidth(device), None)


def _neighbours(own: Tensor) -> Iterator[SelfTestResult]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return
    received = torch.empty_like(own)
    send = dist.P2POp(dist.isend, own, (rank + 1) % world)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    yield _exact("send and receive", received, torch.full((1000,), float((rank - 1) % world + 1)))


def _exact(name: str, found: Tensor, expected: Tensor) -> SelfTestResult:
    return SelfTestResult(f"collective {name}, numbers that are wrong", float((found.cpu() != expected).sum()), 0.0)


def _bandwidth(device: torch.device) -> float:
    """Of a ring: each link carries 2 (n - 1) / n of the bytes."""
    world, large = dist.get_world_size(), torch.zeros(_LARGE, device=device)
    for _ in range(2):
        dist.all_reduce(large)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(large)
    torch.cuda.synchronize()
    return 5 * 4 * _LARGE * 2 * (world - 1) / world / (time.perf_counter() - start) / 1e9


def head(platform: Platform) -> Iterator[SelfTestResult]:
    """The fused head over vocabulary shards of all ranks, against float64 on one."""
    triton = row_kernels._triton_kernels(torch.zeros(1, 1, device=platform.device)) is not None
    kernels = "Triton" if triton else "torch"
    yield from _head(platform, torch.float32, f"head, fp32, {kernels} rows", 1e-5, 1e-5)
    if platform.is_cuda:
        yield from _head(platform, torch.bfloat16, f"head, bf16, {kernels} rows", 1e-5, 5e-3)


def _head(
    platform: Platform, dtype: torch.dtype, name: str, bound: float, gradient_bound: float
) -> Iterator[SelfTestResult]:
    rank, world, device = dist.get_rank(), dist.get_world_size(), platform.device
    generator = torch.Generator().manual_seed(0)
    own = -(-VOCABULARY // world)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(own * world, HIDDEN, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    slopes = torch.randn(2, TOKENS, generator=generator)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logp = ((exact[0] @ exact[1].T)[:, :VOCABULARY] / TEMPERATURE).log_softmax(1)
    chosen, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    wanted = torch.autograd.grad((slopes[0] * chosen + slopes[1] * entropy).sum(), exact)
    shard = slice(rank * own, (rank + 1) * own)
    leaves = [hidden.to(device).requires_grad_(), weight[shard].to(device).requires_grad_()]
    found = vocab_parallel_head_stats(
        leaves[0],
        leaves[1],
        labels.to(device),
        group=dist.group.WORLD,
        vocab_size=VOCABULARY,
        temperature=TEMPERATURE,
        topk=K,
        needs=LossNeeds(entropy_gradient=True),
        chunk_tokens=32,
    )
    assert found.topk_logprobs is not None
    pairs = {
        "log-probabilities": (found.logprobs, chosen),
        "entropy": (found.entropy, entropy),
        "Top-K": (found.topk_logprobs, logp.topk(K).values),
    }
    for what, (mine, expected) in pairs.items():
        yield SelfTestResult(
            f"{name}: {what} against float64", float((mine.double().cpu() - expected).abs().max()), bound
        )
    moved = slopes.to(device)
    part, of_weight = torch.autograd.grad((moved[0] * found.logprobs + moved[1] * found.entropy).sum(), leaves)
    of_hidden = part.float()
    dist.all_reduce(of_hidden)
    for what, mine, expected in (
        ("hidden states", of_hidden, wanted[0]),
        ("weight", of_weight, wanted[1][shard]),
    ):
        error = (mine.double().cpu() - expected).norm() / expected.norm()
        yield SelfTestResult(f"{name}: gradient of {what} against float64, relative", float(error), gradient_bound)


if __name__ == "__main__":
    main()
