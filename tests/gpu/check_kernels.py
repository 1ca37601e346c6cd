"""Each fused kernel of Transformer Engine on and off, forward and backward; and the grouped GEMM of the experts, which
stands in without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from megatron_dppo.parallel.platform import Platform
from megatron_dppo.weights.digests import StreamDigests
from megatron_dppo_engines.weight_digests import WeightLayout
from tests.gpu.checks import Result, not_run

AGAINST_OFF = 1.5
"""Factor by which the fused kernel may be further from transformers in fp32 than what it replaces (both in bf16)."""
SPLITS = [700, 0, 1, 320, 0, 131, 64, 512]
GEMM = 4e-3
NUMBERS = ("logprobs", "gradient_direction", "weights")
TIMES_ANGLE = 2.0
"""Bound on the error of the gradient's norm, over the angle by which bf16 turns the gradient without the kernel."""


def check(device: torch.device) -> Iterator[Result]:
    """All rows that this machine can have."""
    platform = Platform.detect(0, force_cpu=device.type == "cpu")
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    yield from check_grouped_gemm(device)
    yield check_word_hash(device)
    from megatron_dppo.mcore.transformer_engine import has_transformer_engine

    engine = platform.is_cuda and has_transformer_engine()
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        try:
            yield from check_fusions(platform, engine)
        finally:
            dist.destroy_process_group()


def check_word_hash(device: torch.device) -> Result:
    """Digests of weights by the kernel, for all ranks of servers, that differ from those of torch on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (1000, 512), "model.norm.weight": (513,)}
    for part, rows in (("q", 1024), ("k", 256), ("v", 256)):
        shapes[f"model.layers.0.self_attn.{part}_proj.weight"] = (rows, 512)
    for i in range(5):
        expert = f"model.layers.0.mlp.experts.{i}"
        shapes |= {f"{expert}.{part}_proj.weight": (328, 512) for part in ("gate", "up")}
        shapes[f"{expert}.down_proj.weight"] = (512, 328)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    layouts = [WeightLayout(algorithm="words", tp_size=size, plain=True) for size in (1, 2, 8)]
    on_cpu, on_device = StreamDigests(layouts, kv_heads=2), StreamDigests(layouts, kv_heads=2)
    for name, weight in weights.items():
        on_cpu.add(name, weight)
        on_device.add(name, weight.to(device))
    digests = [
        {
            (n, i, name): e.digest
            for n, layout in enumerate(layouts)
            for i in range(layout.tp_size)
            for name, e in stream.expected(layout, i).items()
        }
        for stream in (on_cpu, on_device)
    ]
    return Result("digests of weights that differ", float(len(digests[0].items() ^ digests[1].items())), 0.0)


def check_fusions(platform: Platform, engine: bool) -> Iterator[Result]:
    """The parity of the small model with each fusion alone and with all of them, over that without any."""
    from megatron.core import parallel_state

    from megatron_dppo.mcore.fusions import FUSIONS
    from tests.distributed.parity import Case, measure

    off = dict.fromkeys(FUSIONS, False)

    def errors(*on: str) -> dict[str, float]:
        result = measure(Case(transformer=off | dict.fromkeys(on, True)), platform, "bf16")
        parallel_state.destroy_model_parallel()
        return result

    # Without Transformer Engine Megatron has this one all the same: torch compiles it.
    here = FUSIONS if engine else ("bias_activation_fusion",)
    without = errors()
    for names in ((name,) for name in FUSIONS):
        if names[0] in here:
            yield from _compared(names[0], errors(*names), without)
        else:
            yield not_run(f"{names[0]} on against off", "CUDA and Transformer Engine")
    if engine:
        yield from _compared("all fusions", errors(*FUSIONS), without)
    else:
        yield not_run("all fusions on against off", "CUDA and Transformer Engine")


def _compared(name: str, with_it: dict[str, float], without: dict[str, float]) -> Iterator[Result]:
    for number in NUMBERS:
        yield Result(f"{name}: error of {number}, times that without", with_it[number] / without[number], AGAINST_OFF)
    text = f"{name}: error of the gradient norm (without it {without['grad_norm']:.1e})"
    # An error that turns the gradient by an angle may as well lie along it.
    angle = math.sqrt(2 * without["gradient_direction"])
    yield Result(text, with_it["grad_norm"], TIMES_ANGLE * angle)


def check_grouped_gemm(device: torch.device) -> Iterator[Result]:
    """Experts with many, one and no rows against float64; at the sizes of Qwen3-30B-A3B on CUDA."""
    from megatron_dppo_megatron_cpu.grouped_gemm import grouped_gemm, has_grouped_gemm

    name = "torch._grouped_mm"
    if not hasattr(torch, "_grouped_mm"):
        yield not_run(name, "torch 2.7 or newer")
        return
    wide, narrow = (2048, 768) if device.type == "cuda" else (64, 48)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(sum(SPLITS), size, generator=generator).bfloat16() for size in (wide, narrow))
    weights = [torch.randn(narrow, wide, generator=generator).bfloat16() for _ in SPLITS]
    moved = [t.to(device).requires_grad_() for t in (x, *weights)]
    if device.type == "cuda":
        used = has_grouped_gemm(moved[0], moved[1])
        if not used:
            yield not_run(name, "compute capability 9.0 or newer")
            return
    y = grouped_gemm(moved[0], SPLITS, moved[1:])
    y.backward(grad.to(device))
    parts, grads = torch.split(x.double(), SPLITS), torch.split(grad.double(), SPLITS)
    expected = torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])
    of_x = torch.cat([g @ w.double() for g, w in zip(grads, weights, strict=True)])
    of_weights = torch.stack([g.T @ part for g, part in zip(grads, parts, strict=True)])
    actual = torch.stack([w.grad for w in moved[1:] if w.grad is not None])
    assert moved[0].grad is not None
    for what, mine, right in (("output", y, expected), ("gradient of x", moved[0].grad, of_x)):
        error = (mine.double().cpu() - right).norm() / right.norm()
        yield Result(f"{name}: {what}, relative", float(error), GEMM)
    error = (actual.double().cpu() - of_weights).norm() / of_weights.norm()
    yield Result(f"{name}: gradient of the weights, relative", float(error), GEMM)
    empty = torch.tensor([rows == 0 for rows in SPLITS])
    yield Result(f"{name}: gradient of experts without rows", float(actual.cpu()[empty].abs().max()), 0.0)
