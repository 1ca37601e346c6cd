"""Attention over packed rows against a softmax written out in float64, and how sequences are group_by_length."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo_megatron_cpu.attention import (
    PackedRow,
    SDPACoreAttention,
    group_by_length,
)

HEADS, GROUPS, WIDTH = 6, 2, 8


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: list[int],
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence and one head after the other. ``window`` counts the query's own key, as Hugging Face does."""
    rows = []
    for a, b in pairwise(starts):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = query[a:b, head] @ key[a:b, group].T / WIDTH**0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if window is not None:
                hidden |= torch.ones_like(hidden).tril(-window)
            weights = scores.masked_fill(hidden, -torch.inf).exp()
            total = weights.sum(1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
            heads.append(weights / total @ value[a:b, group])
        rows.append(torch.cat(heads, 1))
    return torch.cat(rows)


CONFIG: dict[str, Any] = dict(
    attention_dropout=0.0,
    window_size=None,
    window_attn_skip_freq=None,
    softmax_type="vanilla",
    num_attention_heads=HEADS,
    tensor_model_parallel_size=1,
    params_dtype=torch.float64,
    use_cpu_initialization=True,
)


def attended(
    lengths: list[int], inputs: list[Tensor], sinks: Tensor | None = None, layer: int = 1, **fields: Any
) -> Tensor:
    """The layer's answer on a packed row."""
    starts = [0, *accumulate(lengths)]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    row = PackedRow.from_batch(
        SimpleNamespace(cu_seqlens=cu_seqlens, max_seqlen=max(lengths), position_ids=positions), starts
    )  # type: ignore[arg-type]
    attention = SDPACoreAttention(
        SimpleNamespace(**CONFIG | fields), layer_number=layer, attn_mask_type=None, attention_type="self"
    )
    if sinks is not None:
        assert attention.softmax_offset is not None and attention.softmax_offset.shape == sinks.shape
        del attention.softmax_offset
        attention.softmax_offset = sinks  # type: ignore[assignment]
    return attention(*inputs, None, packed_seq_params=row)


@pytest.mark.parametrize("lengths", [[5], [7] * 9, [3, 1, 9, 2], [700, 5, 30, 699, 31, 2, 350, 1]])
def test_every_token_sees_its_own_past_and_nothing_else(lengths: list[int]) -> None:
    torch.manual_seed(0)
    starts = [0, *accumulate(lengths)]
    shapes = [(starts[-1], heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    got = attended(lengths, inputs)
    expected = written_out(*inputs, starts)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
def test_windows_and_sinks_equal_a_softmax_written_out(window: int | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 9, 2, 70]
    starts = [0, *accumulate(lengths)]
    shapes = [(starts[-1], heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if has_sinks else None
    fields: dict[str, Any] = {"softmax_type": "learnable"} if has_sinks else {}
    if window is not None:
        # Megatron counts the keys before the query's own. The second layer has no window.
        fields |= {"window_size": (window - 1, 0), "window_attn_skip_freq": [1, 0]}
    expected = written_out(*inputs, starts, window, sinks)
    got = attended(lengths, inputs, sinks, **fields)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    full = attended(lengths, inputs, sinks, layer=2, **fields)
    torch.testing.assert_close(full, written_out(*inputs, starts, None, sinks), atol=1e-12, rtol=0)
    leaves = inputs if sinks is None else [*inputs, sinks]
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_a_large_mask_is_made_block_by_block_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two context-parallel ranks, one after the other: the first and last, and the middle quarters of a sequence."""
    torch.manual_seed(0)
    tokens, quarter = 1024, 256
    shapes = [(tokens, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected = written_out(query, key, value, [0, tokens])
    attention = SDPACoreAttention(SimpleNamespace(**CONFIG), layer_number=1, attn_mask_type=None, attention_type="self")
    monkeypatch.setattr("megatron_dppo_megatron_cpu.attention.MASK_SIZE", 40 * tokens)
    results, largest = [], 0
    for quarters in ((0, 3), (1, 2)):
        positions = torch.cat([torch.arange(i * quarter, (i + 1) * quarter) for i in quarters])

        def pack(saved: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, saved.untyped_storage().nbytes())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            parts = (query[positions][None], key[None], value[None], positions[None])
            output = attention.attend_bucket(*parts)[0].flatten(1)
        torch.testing.assert_close(output, expected[positions], atol=1e-12, rtol=0)
        results.append((output * expected[positions].detach()).sum())
    assert largest <= query.nbytes < 2 * quarter * tokens, "a mask of all queries is kept"
    inputs = [query, key, value]
    gradients = torch.autograd.grad(sum(results), inputs)
    for actual, exact in zip(gradients, torch.autograd.grad((expected * expected.detach()).sum(), inputs), strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-11, rtol=0)


def test_short_sequences_in_bf16_are_rounded_once_at_the_end_on_a_cpu() -> None:
    """They are computed in fp32: every output is the bf16 number next to the exact one, or one beside it."""
    torch.manual_seed(0)
    lengths = [60, 3, 64]
    inputs = [torch.randn(sum(lengths), heads, WIDTH).bfloat16() for heads in (HEADS, GROUPS, GROUPS)]
    got = attended(lengths, inputs)
    expected = written_out(*(x.double() for x in inputs), [0, *accumulate(lengths)])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-6)


def test_groups_hold_each_sequence_once_and_little_padding() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [int(draw.lognormvariate(5, 1.5)) + 1 for _ in range(draw.randrange(1, 60))]
        groups = group_by_length(lengths)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        for group in groups:
            tokens = sum(lengths[i] for i in group)
            assert len(group) * max(lengths[i] for i in group) <= max(1.25 * tokens, tokens + 1024)
    assert group_by_length([4000, 900, 4000, 900]) == [[0, 2], [1, 3]]
    assert len(group_by_length(list(range(1, 30)))) == 1, "short ones together: a call costs more than their padding"
