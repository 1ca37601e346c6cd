from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.packing import micro_batches, pack, split_by_tokens
from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.types import MicroBatch, TrainingSample


def sample(length: int, tag: int = 0, with_logprobs: bool = True) -> TrainingSample:
    """A sample of ``length`` positions whose tokens, advantages and log-probabilities say where they come from."""
    response = [100 * tag + i for i in range(1, length + 1)]
    return to_training_sample([99], response, [-0.01 * t for t in response] if with_logprobs else None, float(tag + 1))


def without_padding(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """``(tokens, labels)`` of the sequences that carry loss."""
    bounds = pairwise(batch.cu_seqlens.tolist())
    parts = [slice(*b) for b in bounds]
    return [(batch.tokens[p].tolist(), batch.labels[p].tolist()) for p in parts if batch.loss_mask[p].any()]


def test_a_worked_case_of_two_samples_and_padding() -> None:
    first = to_training_sample([5, 6], [7, 2], [-0.5, -0.25], 2.0)
    second = to_training_sample([8], [2], [-1.0], -1.0)
    batch = pack([first, second], multiple=8)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert batch.labels.tolist() == [6, 7, 2, 2, 0, 0, 0, 0]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, False, False, False]
    assert batch.advantages.tolist() == [0, 2, 2, -1, 0, 0, 0, 0]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [0, -0.5, -0.25, -1, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 4


def test_a_row_that_fits_the_multiple_gets_no_padding() -> None:
    batch = pack([sample(3), sample(5, tag=1)], multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 3, 8] and batch.max_seqlen == 5


def test_a_row_of_nothing_is_padding_outside_the_loss() -> None:
    batch = pack([], multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 4] and not batch.loss_mask.any()
    for field in (batch.tokens, batch.labels, batch.advantages, batch.rollout_logprobs):
        assert field is not None and field.tolist() == [0] * 4
    dtypes = (batch.tokens.dtype, batch.loss_mask.dtype, batch.advantages.dtype)
    assert dtypes == (torch.int64, torch.bool, torch.float32)


def test_missing_rollout_logprobs_stay_missing_and_are_never_made_up() -> None:
    assert pack([sample(3, with_logprobs=False), sample(2, with_logprobs=False)], multiple=8).rollout_logprobs is None
    for mixed in ([sample(3), sample(2, with_logprobs=False)], [sample(2, with_logprobs=False), sample(3)]):
        with pytest.raises(ValueError, match="with and without rollout log-probabilities"):
            pack(mixed)


def test_the_split_is_greedy_in_order_and_a_long_sample_stands_alone() -> None:
    samples = [sample(n) for n in (4, 4, 3, 20, 2, 8, 1)]
    parts = split_by_tokens(samples, budget=10)
    assert [[s.num_tokens for s in part] for part in parts] == [[4, 4], [3], [20], [2, 8], [1]]
    assert split_by_tokens([], budget=10) == []


def test_spare_micro_batches_get_samples_before_they_get_padding() -> None:
    samples = [sample(2, tag=i) for i in range(5)]
    for count, filled in ((1, 1), (2, 2), (4, 4), (5, 5), (7, 5)):
        batches = micro_batches(samples, budget=100, count=count, multiple=4)
        assert len(batches) == count
        assert [bool(b.loss_mask.any()) for b in batches] == [True] * filled + [False] * (count - filled)
    assert [len(without_padding(b)) for b in micro_batches(samples, budget=100, count=3)] == [2, 1, 2]


def test_more_micro_batches_than_the_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 micro-batches of 4 tokens .* count = 1"):
        micro_batches([sample(4), sample(4)], budget=4, count=1)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=12),
    budget=st.integers(1, 30),
    extra=st.integers(0, 5),
    multiple=st.integers(1, 8),
)
def test_packing_loses_nothing_keeps_the_order_and_holds_its_promises(
    lengths: list[int], budget: int, extra: int, multiple: int
) -> None:
    samples = [sample(n, tag=i) for i, n in enumerate(lengths)]
    needed = len(split_by_tokens(samples, budget))
    batches = micro_batches(samples, budget, needed + extra, multiple)
    assert len(batches) == needed + extra
    assert [s for b in batches for s in without_padding(b)] == [(s.tokens.tolist(), s.labels.tolist()) for s in samples]
    assert sum(bool(b.loss_mask.any()) for b in batches) == min(needed + extra, len(samples))
    for batch in batches:
        total, real = batch.tokens.numel(), without_padding(batch)
        assert total > 0 and total % multiple == 0
        assert total - sum(len(t) for t, _ in real) < max(multiple, 1) + (not real)
        assert len(real) <= 1 or sum(len(t) for t, _ in real) <= budget
        starts = batch.cu_seqlens.tolist()
        assert starts[0] == 0 and starts[-1] == total
        spans = list(pairwise(starts))
        assert batch.max_seqlen == max(b - a for a, b in spans)
        assert batch.position_ids.tolist() == [i for a, b in spans for i in range(b - a)]
        assert batch.sequence_ids.tolist() == [k for k, (a, b) in enumerate(spans) for _ in range(a, b)]
        assert batch.rollout_logprobs is not None
        expected = torch.where(batch.loss_mask, -0.01 * batch.labels, 0.0)
        torch.testing.assert_close(batch.rollout_logprobs, expected)
