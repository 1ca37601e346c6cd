"""Process of the self-test: ``python -m megatron_dppo_doctor.doctor.self_test_rank FOLDER``, with RANK set.

Rank 0 writes each finished check as a line of ``FOLDER/checks.jsonl``.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.head import row_kernels
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import LossNeeds
from megatron_dppo_doctor.doctor.network import fastest, ring_gigabytes, shift
from megatron_dppo_doctor.doctor.self_test import SelfTestCheck

NUM_TOKENS = 96
HIDDEN_SIZE = 64
VOCAB_SIZE = 1003
TOPK = 8
TEMPERATURE = 0.7
_BANDWIDTH_NUMEL = 64 * 2**20
"""Elements of the timed all-reduce: 256 MiB in fp32."""


def main() -> None:
    """Join the process group and run the checks."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    platform = Platform.detect()
    torch.set_num_threads(1)
    # The reference is float64: errors of TF32 would be 1,000 times larger than those of fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    report = None if rank else (folder / "checks.jsonl").open("a")
    # All ranks yield the same checks in the same order, so the reduction of each matches across ranks.
    for check in run_checks(platform):
        value = float("inf") if math.isnan(check.value) else check.value
        worst = torch.tensor(value, dtype=torch.float64, device=platform.device)
        # Of a bandwidth the slowest rank counts.
        dist.all_reduce(worst, op=dist.ReduceOp.MIN if check.bound is None else dist.ReduceOp.MAX)
        if report is not None:
            reduced = replace(check, value=float(worst))
            print(json.dumps(asdict(reduced)), file=report, flush=True)
    dist.destroy_process_group()


def run_checks(platform: Platform) -> Iterator[SelfTestCheck]:
    """Check collectives, then the head, then a whole model."""
    yield from check_collectives(platform)
    yield from check_head(platform)
    # Megatron is imported last: collectives and head are checked even where its import fails.
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo_doctor.doctor.self_test_model import check_model

    yield from check_model(platform)


def check_collectives(platform: Platform) -> Iterator[SelfTestCheck]:
    """Check each collective of training on integers, whose results are exact."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    device = platform.device
    local = torch.full((1000,), float(rank + 1), device=device)
    summed = local.clone()
    dist.all_reduce(summed)
    yield _compare_exactly("all-reduce", summed, torch.full((1000,), world * (world + 1) / 2))
    gathered = local.new_empty(world * 1000)
    dist.all_gather_into_tensor(gathered, local)
    yield _compare_exactly("all-gather", gathered, torch.arange(1.0, world + 1).repeat_interleave(1000))
    scattered = local.new_empty(1000)
    dist.reduce_scatter_tensor(scattered, gathered * (rank + 1))
    yield _compare_exactly("reduce-scatter", scattered, torch.full((1000,), (rank + 1) * world * (world + 1) / 2))
    # Rank j receives j + 1 rows from every rank.
    splits = list(range(1, world + 1))
    sent = torch.cat([torch.full((n, 8), 100.0 * rank + n, device=device) for n in splits])
    received = sent.new_empty(world * (rank + 1), 8)
    dist.all_to_all_single(received, sent, [rank + 1] * world, splits)
    sources = torch.arange(world).repeat_interleave(rank + 1)
    yield _compare_exactly("all-to-all of uneven parts", received, (100.0 * sources + rank + 1)[:, None].expand(-1, 8))
    broadcast = local.clone()
    dist.broadcast(broadcast, world - 1)
    yield _compare_exactly("broadcast", broadcast, torch.full((1000,), float(world)))
    if world > 1:
        received = torch.empty_like(local)
        shift(local, received)
        yield _compare_exactly("send and receive", received, torch.full((1000,), float((rank - 1) % world + 1)))
    if platform.is_cuda:
        large = torch.zeros(_BANDWIDTH_NUMEL, device=device)
        seconds = fastest(lambda: dist.all_reduce(large), device)
        speed = ring_gigabytes(large.nbytes, world) / seconds
        yield SelfTestCheck("all-reduce of 256 MiB, GB/s of each link", speed, None)


def _compare_exactly(name: str, result: Tensor, expected: Tensor) -> SelfTestCheck:
    num_wrong = float((result.cpu() != expected).sum())
    return SelfTestCheck(f"collective {name}: wrong elements", num_wrong, 0.0)


def check_head(platform: Platform) -> Iterator[SelfTestCheck]:
    """Compare the fused head, sharded over all ranks, with float64 on one rank."""
    has_triton = row_kernels.triton_kernels(torch.zeros(1, 1, device=platform.device)) is not None
    kernels = "Triton" if has_triton else "torch"
    yield from _check_head_dtype(platform, torch.float32, f"head, fp32, {kernels} rows", 1e-5, 1e-5)
    if platform.is_cuda:
        yield from _check_head_dtype(platform, torch.bfloat16, f"head, bf16, {kernels} rows", 1e-5, 5e-3)


def _check_head_dtype(
    platform: Platform, dtype: torch.dtype, name: str, bound: float, gradient_bound: float
) -> Iterator[SelfTestCheck]:
    rank = dist.get_rank()
    world = dist.get_world_size()
    device = platform.device
    shard_size = -(-VOCAB_SIZE // world)
    shard = slice(rank * shard_size, (rank + 1) * shard_size)

    # Every rank draws the same inputs; the padded rows of the weight lie behind the vocabulary.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(shard_size * world, HIDDEN_SIZE, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    # Random gradients of log-probability and entropy, [2, num_tokens].
    slopes = torch.randn(2, NUM_TOKENS, generator=generator)

    # Reference on one rank in float64.
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logits = (exact[0] @ exact[1].T)[:, :VOCAB_SIZE] / TEMPERATURE
    all_logprobs = logits.log_softmax(1)
    label_logprobs = all_logprobs.gather(1, labels[:, None])[:, 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(1)
    exact_gradients = torch.autograd.grad((slopes[0] * label_logprobs + slopes[1] * entropy).sum(), exact)

    # The fused head on this rank's shard of the vocabulary.
    leaves = [hidden.to(device).requires_grad_(), weight[shard].to(device).requires_grad_()]
    stats = vocab_parallel_head_stats(
        leaves[0],
        leaves[1],
        labels.to(device),
        group=dist.group.WORLD,
        vocab_size=VOCAB_SIZE,
        temperature=TEMPERATURE,
        topk=TOPK,
        needs=LossNeeds(entropy_gradient=True),
        chunk_tokens=32,
    )
    assert stats.topk_logprobs is not None
    pairs = {
        "log-probabilities": (stats.logprobs, label_logprobs),
        "entropy": (stats.entropy, entropy),
        "Top-K": (stats.topk_logprobs, all_logprobs.topk(TOPK).values),
    }
    for quantity, (actual, expected) in pairs.items():
        error = (actual.double().cpu() - expected).abs().max()
        yield SelfTestCheck(f"{name}: {quantity} against float64", float(error), bound)

    # The gradient of the hidden states is a sum over the shards; that of the weight is the shard's.
    device_slopes = slopes.to(device)
    objective = (device_slopes[0] * stats.logprobs + device_slopes[1] * stats.entropy).sum()
    partial_hidden_gradient, weight_gradient = torch.autograd.grad(objective, leaves)
    hidden_gradient = partial_hidden_gradient.float()
    dist.all_reduce(hidden_gradient)
    for quantity, actual, expected in (
        ("hidden states", hidden_gradient, exact_gradients[0]),
        ("weight", weight_gradient, exact_gradients[1][shard]),
    ):
        error = (actual.double().cpu() - expected).norm() / expected.norm()
        yield SelfTestCheck(f"{name}: gradient of {quantity} against float64, relative", float(error), gradient_bound)


if __name__ == "__main__":
    main()
