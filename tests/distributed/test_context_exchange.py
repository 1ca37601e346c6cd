"""Tokens of all heads become heads of all tokens, and back, forward and backward: against indexing of the whole row."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from megatron_dppo_megatron_cpu.context import ContextShard
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

LENGTHS = (8, 24, 16)
"""Tokens of each sequence."""
SECTIONS = (8, 4, 12)
"""Columns of each kind: queries, keys and values, say."""


def tokens_of(rank: int, size: int) -> Tensor:
    """Return the positions of a rank's tokens: of ``2 * size`` chunks of each sequence the one from each end."""
    positions = []
    for start, end in pairwise(accumulate(LENGTHS, initial=0)):
        chunks = torch.arange(start, end).chunk(2 * size)
        positions += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(positions)


def columns_of(rank: int, size: int) -> Tensor:
    """Return the columns of a rank's heads, in the order of the kinds."""
    kinds = pairwise(accumulate(SECTIONS, initial=0))
    return torch.cat([torch.arange(start, end).chunk(size)[rank] for start, end in kinds])


def check(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    row, weight = (torch.randn(sum(LENGTHS), sum(SECTIONS), generator=generator, dtype=torch.float64) for _ in "ab")
    starts = torch.tensor([0, *accumulate(LENGTHS)])
    shard = ContextShard.of(starts, torch.distributed.group.WORLD)
    tokens, columns = tokens_of(rank, size), columns_of(rank, size)
    assert torch.equal(shard.split(row), row[tokens])

    local = row[tokens].requires_grad_()
    heads = shard.tokens_to_heads(local, SECTIONS)
    assert torch.equal(heads, row[:, columns])
    # The gradient of a token's columns comes from the ranks that have these heads.
    (gradient,) = torch.autograd.grad((heads * weight[:, columns]).sum(), local)
    assert torch.equal(gradient, weight[tokens])

    heads = row[:, columns].requires_grad_()
    back = shard.heads_to_tokens(heads)
    order = torch.cat([columns_of(other, size) for other in range(size)])
    assert torch.equal(back, row[tokens][:, order])
    (gradient,) = torch.autograd.grad((back * weight[tokens][:, order]).sum(), heads)
    assert torch.equal(gradient, weight[:, columns])

    # Of a loss that each rank computes from the whole row, and of one that each computes partly.
    for gather, expected in ((shard.gather, weight[tokens]), (shard.gather_for_partial, weight[tokens] * size)):
        local = row[tokens].requires_grad_()
        whole = gather(local)
        assert torch.equal(whole, row)
        (gradient,) = torch.autograd.grad((whole * weight).sum(), local)
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("processes", [2, 4])
def test_tokens_and_heads_are_exchanged(processes: int) -> None:
    run_distributed(check, processes)
