"""The order of context parallelism."""

from __future__ import annotations

import pytest
import torch

from megatron_dppo_megatron_cpu.context import zigzag_index


def test_every_rank_takes_a_chunk_from_the_front_and_one_from_the_back_of_each_sequence() -> None:
    starts = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_index(starts, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_index(starts, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_the_ranks_share_a_row_without_rest_and_with_equal_causal_work() -> None:
    starts, size = torch.tensor([0, 24, 36]), 3
    shares = [zigzag_index(starts, rank, size) for rank in range(size)]
    assert torch.cat(shares).sort().values.equal(torch.arange(36))
    work = [int((share - torch.where(share < 24, 0, 24) + 1).sum()) for share in shares]
    assert len(set(work)) == 1


def test_a_sequence_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"6 tokens; .* over 2 ranks"):
        zigzag_index(torch.tensor([0, 8, 14]), 0, 2)
