"""The gated delta rule by chunks is the one of its definition, token by token; the norms of such models; its cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megatron_dppo.hf.folder import weight_shapes
from megatron_dppo.mcore.delta_rule import TORCH_KERNELS, delta_rule, l2_norm
from megatron_dppo.policy.packed import attention_length
from megatron_dppo_megatron_cpu.attention import PackedRow
from megatron_dppo_megatron_cpu.layers import rms_norm
from megatron_dppo_plan.arithmetic import plan_kv_cache
from megatron_dppo_plan.machine import get_machine
from tests.distributed.families import recurrent_rule
from tests.unit.configs import config as run_config


def inputs(tokens: int, *, forgets: float) -> list[Tensor]:
    """Queries, keys, values, decay and beta of 2 sequences with 2 key heads and 4 value heads, in float64."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(2, 6), (2, 6), (4, 5)]
    q, k, v = (torch.randn(2, tokens, *size, generator=generator, dtype=torch.float64) for size in sizes)
    decay, beta = (torch.rand(2, tokens, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, -forgets * decay, beta)]


@pytest.mark.parametrize("forgets", [0.01, 30.0])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 150])
def test_the_rule_by_chunks_is_the_rule_token_by_token(tokens: int, forgets: float) -> None:
    results: list[list[Tensor]] = []
    for by_chunks in (True, False):
        parts = inputs(tokens, forgets=forgets)
        q, k, v, decay, beta = parts
        if by_chunks:
            q, k = (l2_norm(x).repeat_interleave(2, 2) for x in (q, k))
            output = delta_rule(q, k, v, decay, beta)
        else:
            output, _ = recurrent_rule(q, k, v, decay, beta)
        weight = torch.arange(output.numel(), dtype=torch.float64).view_as(output).sin()
        gradients = torch.autograd.grad((output * weight).sum(), parts)
        results.append([output, *gradients])
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-10)


LENGTHS = (1, 63, 65, 150, 20)
"""Sequences of one packed row, around the chunk of 64 tokens."""


def by_sequence(rule: Callable[..., tuple[Tensor, Tensor]], repeat: int = 1, **keys: bool) -> Callable[..., Tensor]:
    """Return the rule for a packed row, one sequence after the other."""

    def mix(query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        parts = [x.repeat_interleave(repeat, 1) for x in (query, key)] + list(others)
        sequences = zip(*(x[None].split(LENGTHS, 1) for x in parts), strict=True)
        return torch.cat([rule(*sequence, **keys)[0][0] for sequence in sequences])

    return mix


@pytest.mark.parametrize("forgets", [0.001, 1.0])
def test_a_row_in_bf16_is_as_near_to_the_recurrence_in_float64_as_that_of_transformers(forgets: float) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    sizes = [(2, 16), (2, 16), (4, 24), (4,)]
    query, key, value, beta = (torch.randn(tokens, *size, generator=generator).bfloat16() for size in sizes)
    decay = -forgets * torch.rand(tokens, 4, generator=generator)
    weight = torch.randn(tokens, 4, 24, generator=generator)
    starts = tuple(accumulate(LENGTHS, initial=0))
    row = PackedRow(starts=starts, positions=torch.cat([torch.arange(length) for length in LENGTHS]))
    rules: dict[str, Callable[..., Tensor]] = {
        "ours": lambda *parts: TORCH_KERNELS.mix(*parts, row),
        "transformers": by_sequence(torch_chunk_gated_delta_rule, repeat=2, use_qk_l2norm_in_kernel=True),
        "exact": by_sequence(recurrent_rule),
    }
    results: dict[str, list[Tensor]] = {}
    for name, rule in rules.items():
        inputs = (query, key, value, decay, beta.sigmoid())
        parts = [(x.double() if name == "exact" else x.clone()).requires_grad_() for x in inputs]
        output = rule(*parts)
        results[name] = [output, *torch.autograd.grad((output.double() * weight).sum(), parts)]
    for actual, theirs, exact in zip(*results.values(), strict=True):
        errors = [float((x.double() - exact).norm() / exact.norm()) for x in (actual, theirs)]
        assert errors[0] < 0.004 and errors[0] < 1.05 * errors[1], errors


def test_the_convolution_of_a_row_is_that_of_each_sequence() -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 2, 3, 9, 4)
    channels, width = 5, 4
    inputs = torch.randn(sum(lengths), channels, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(channels, width, generator=generator, dtype=torch.float64).requires_grad_()
    row = PackedRow(positions=torch.cat([torch.arange(length) for length in lengths]))
    expected = []
    for sequence in inputs.split(lengths):
        padded = torch.nn.functional.pad(sequence.T, (width - 1, 0))
        expected.append(torch.nn.functional.conv1d(padded, weight[:, None], groups=channels).T)
    outputs = TORCH_KERNELS.convolve(inputs, weight, row), torch.nn.functional.silu(torch.cat(expected))
    slopes = torch.randn(outputs[0].shape, generator=generator, dtype=torch.float64)
    results = [[output, *torch.autograd.grad((output * slopes).sum(), (inputs, weight))] for output in outputs]
    for actual, reference in zip(*results, strict=True):
        assert torch.allclose(actual, reference, rtol=1e-12, atol=1e-12)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    q, k, v, decay, beta = inputs(90, forgets=0.1)
    k, q = k.repeat_interleave(2, 2), q.repeat_interleave(2, 2)
    whole = delta_rule(q, l2_norm(k), v, decay, beta)
    short = delta_rule(*(x[:, :70] for x in (q, l2_norm(k), v, decay, beta)))
    assert torch.allclose(whole[:, :70], short, rtol=1e-12, atol=1e-12)


def test_a_zero_centered_norm_multiplies_by_one_plus_its_weight_and_rounds_once() -> None:
    x, weight = torch.randn(5, 16).bfloat16(), (0.1 * torch.randn(16)).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    assert torch.equal(rms_norm(x, weight, 1e-6, zero_centered=True), exact.bfloat16())
    plain = rms_norm(x.float(), 1 + weight.float(), 1e-6)
    assert torch.allclose(rms_norm(x.float(), weight.float(), 1e-6, zero_centered=True), plain, rtol=1e-6)


# By hand, of the models' config.json: 36 and 30 layers of linear attention, 12 and 10 of full attention, which caches
# keys and values of 2 heads of 256. A state has 32 heads of 128 x 128 in fp32, the convolution 3 inputs of 8192.
@pytest.mark.parametrize(
    ("family", "linear", "full", "share"), [("qwen3_next", 36, 12, 10 / 512), ("qwen3_5_moe_text", 30, 10, 8 / 256)]
)
def test_linear_attention_caches_states_and_costs_what_its_matrices_and_states_do(
    family: str, linear: int, full: int, share: float
) -> None:
    hf_config: Any = AutoConfig.for_model(family)
    config = run_config(rollout={"engine": "sglang", "dtype": "bf16", "sglang": {"tp-size": 2}})
    planned = plan_kv_cache(config, hf_config, 0, get_machine("h200"))
    assert planned.bytes_per_token == full * 2 * 2 * 256 * 2
    assert planned.bytes_per_sequence == linear * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert planned.cache_bytes is not None and planned.tokens_in_flight is not None
    one = planned.longest * planned.bytes_per_token + planned.bytes_per_sequence
    assert planned.tokens_in_flight == 2 * planned.cache_bytes * planned.longest // one
    # Every weight but the embedding, the norms and the experts that are not chosen is one multiplication.
    shapes = {n: s for n, s in weight_shapes(hf_config).items() if len(s) == 2 and "embed_tokens" not in n}
    shapes = {n: s for n, s in shapes.items() if "shared_expert_gate" not in n}
    total = sum(math.prod(s) * (share if ".experts." in n else 1) for n, s in shapes.items())
    total += linear * 3 * 32 * 128 * 128
    assert attention_length(hf_config) == pytest.approx(total / (full * 2 * 16 * 256 / 2), rel=1e-9)
