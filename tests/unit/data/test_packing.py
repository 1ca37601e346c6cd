from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.training_samples import RowShape, fill_bins, pack, split_evenly, to_training_sample
from megatron_dppo.types import MicroBatch, MicroBatches, TrainingSample


def sample(length: int, tag: int = 0, with_logprobs: bool = True) -> TrainingSample:
    """A sample of ``length`` positions whose tokens, advantages and log-probabilities say where they come from."""
    response = [100 * tag + i for i in range(1, length + 1)]
    return to_training_sample([99], response, [-0.01 * t for t in response] if with_logprobs else None, float(tag + 1))


def without_padding(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """``(tokens, labels)`` of the sequences that carry loss."""
    bounds = pairwise(batch.cu_seqlens.tolist())
    parts = [slice(*b) for b in bounds]
    return [(batch.tokens[p].tolist(), batch.labels[p].tolist()) for p in parts if batch.loss_mask[p].any()]


def micro_batches(samples: list[TrainingSample], budget: int, count: int, shape: RowShape) -> list[MicroBatch]:
    """Pack samples as ``PolicyTrainer.pack`` does on one rank."""
    bins = split_evenly(fill_bins(samples, budget, shape), count)
    return [pack([samples[i] for i in part], shape, samples[0]) for part in bins]


def unpadded(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """The same without what a sequence is padded with: labels 0 stand for nothing else here."""
    return [(t[: len(kept)], kept) for t, y in without_padding(batch) for kept in [[i for i in y if i]]]


def test_a_worked_case_of_two_samples_and_padding() -> None:
    first = to_training_sample([5, 6], [7, 2], [-0.5, -0.25], 2.0)
    second = to_training_sample([8], [2], [-1.0], -1.0)
    batch = pack([first, second], RowShape(row_multiple=8))
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
    batch = pack([sample(3), sample(5, tag=1)], RowShape(row_multiple=4))
    assert batch.cu_seqlens.tolist() == [0, 3, 8] and batch.max_seqlen == 5


def test_an_empty_row_is_padding_outside_the_loss() -> None:
    batch = pack([], RowShape(row_multiple=4), like=sample(3))
    assert batch.cu_seqlens.tolist() == [0, 4] and not batch.loss_mask.any()
    for field in (batch.tokens, batch.labels, batch.advantages, batch.rollout_logprobs):
        assert field is not None and field.tolist() == [0] * 4
    dtypes = (batch.tokens.dtype, batch.loss_mask.dtype, batch.advantages.dtype)
    assert dtypes == (torch.int64, torch.bool, torch.float32)


def test_missing_rollout_logprobs_stay_missing() -> None:
    without = pack([sample(3, with_logprobs=False), sample(2, with_logprobs=False)], RowShape(row_multiple=8))
    assert without.rollout_logprobs is None
    for mixed in ([sample(3), sample(2, with_logprobs=False)], [sample(2, with_logprobs=False), sample(3)]):
        with pytest.raises(ValueError, match="with and without rollout_logprobs"):
            pack(mixed)


def test_bins_are_filled_longest_first_and_a_long_sample_gets_a_separate_bin() -> None:
    samples = [sample(n) for n in (4, 4, 3, 20, 2, 8, 1)]
    bins = fill_bins(samples, budget=10)
    assert [[samples[i].num_tokens for i in part] for part in bins] == [[20], [8, 2], [4, 4, 1], [3]]
    padded = fill_bins(samples, budget=10, shape=RowShape(sequence_multiple=4))
    assert [[samples[i].num_tokens for i in part] for part in padded] == [[20], [8], [4, 4], [3, 2], [1]]
    assert fill_bins([], budget=10) == []


def test_spare_micro_batches_get_samples_before_they_get_padding() -> None:
    samples = [sample(2, tag=i) for i in range(5)]
    for count, filled in ((1, 1), (2, 2), (4, 4), (5, 5), (7, 5)):
        batches = micro_batches(samples, budget=100, count=count, shape=RowShape(row_multiple=4))
        assert len(batches) == count
        assert [bool(b.loss_mask.any()) for b in batches] == [True] * filled + [False] * (count - filled)
    assert [len(without_padding(b)) for b in micro_batches(samples, 100, 3, RowShape())] == [2, 1, 2]


def test_more_micro_batches_than_the_count_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 micro-batches are needed"):
        micro_batches([sample(4), sample(4)], 4, 1, RowShape())


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    budget=st.integers(1, 30),
    extra=st.integers(0, 5),
    multiples=st.sampled_from([(1, 1), (5, 1), (4, 4), (8, 4), (12, 6)]),
)
def test_packing_loses_no_sample_and_satisfies_its_invariants(
    lengths: list[int], budget: int, extra: int, multiples: tuple[int, int]
) -> None:
    shape = RowShape(row_multiple=multiples[0], sequence_multiple=multiples[1])
    samples = [sample(n, tag=i) for i, n in enumerate(lengths)]
    needed = len(fill_bins(samples, budget, shape))
    batches = micro_batches(samples, budget, needed + extra, shape)
    assert len(batches) == needed + extra
    actual = sorted(s for b in batches for s in unpadded(b))
    assert actual == sorted((s.tokens.tolist(), s.labels.tolist()) for s in samples)
    assert sum(bool(b.loss_mask.any()) for b in batches) == min(needed + extra, len(samples))
    for batch in batches:
        total, real = batch.tokens.numel(), without_padding(batch)
        starts = batch.cu_seqlens.tolist()
        spans = list(pairwise(starts))
        assert total > 0 and total % shape.row_multiple == 0 and starts[0] == 0 and starts[-1] == total
        assert all((b - a) % shape.sequence_multiple == 0 for a, b in spans)
        assert total - sum(len(t) for t, _ in real) < shape.row_multiple + (not real)
        assert len(real) <= 1 or sum(len(t) for t, _ in real) <= budget
        assert batch.max_seqlen == max(b - a for a, b in spans)
        assert batch.position_ids.tolist() == [i for a, b in spans for i in range(b - a)]
        assert batch.sequence_ids.tolist() == [k for k, (a, b) in enumerate(spans) for _ in range(a, b)]
        assert batch.rollout_logprobs is not None
        expected = torch.where(batch.loss_mask, -0.01 * batch.labels, 0.0)
        torch.testing.assert_close(batch.rollout_logprobs, expected)


def test_topk_and_recomputed_fields_are_padded_with_neutral_values() -> None:
    topk = (torch.tensor([[3, 4, -1], [5, 6, 2]], dtype=torch.int32), torch.full((2, 3), -1.0))
    first = to_training_sample([5, 6], [3, 2], [-0.5, -0.25], 2.0, topk)
    first = replace(first, recomputed_logprobs=torch.full((3,), -2.0))
    batch = pack([first], RowShape(row_multiple=8, sequence_multiple=4))
    assert batch.rollout_topk_ids is not None and batch.recomputed_logprobs is not None
    assert batch.rollout_topk_ids.tolist() == [[-1] * 3, [3, 4, -1], [5, 6, 2]] + [[-1] * 3] * 5
    assert batch.recomputed_logprobs.tolist() == [-2.0] * 3 + [0.0] * 5 and batch.reference_logprobs is None
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    empty = pack([], RowShape(row_multiple=4), like=first)
    assert empty.rollout_topk_ids is not None and empty.rollout_topk_ids.tolist() == [[-1] * 3] * 4
    with pytest.raises(ValueError, match=r"\[2, K\+1\]"):
        to_training_sample([5], [3, 2], None, 0.0, (topk[0][:1], topk[1][:1]))


def test_samples_with_other_shapes_or_types_of_a_column_do_not_share_a_row() -> None:
    one = to_training_sample([1, 2], [3], [-0.5], 1.0, (torch.zeros(1, 3).int(), torch.zeros(1, 3)))
    other = to_training_sample([1, 2], [3], [-0.5], 1.0, (torch.zeros(1, 1).int(), torch.zeros(1, 1)))
    with pytest.raises(ValueError, match="rollout_topk_ids cannot share"):
        pack([one, other])


def test_topk_values_are_at_response_tokens_and_unused_slots_elsewhere() -> None:
    ids = torch.tensor([[7, 8], [9, -1]], dtype=torch.int32)
    one_sample = to_training_sample([1, 2, 3], [7, 9], [-0.5, -0.25], 1.0, (ids, -ids.float()))
    result = pack([one_sample, one_sample], RowShape(sequence_multiple=3, row_multiple=4))
    unused = [[-1, -1]]
    one = [*unused * 2, [7, 8], [9, -1], *unused * 2]
    assert result.rollout_topk_ids is not None and result.rollout_topk_ids.tolist() == one + one
    assert (
        result.labels.tolist()[2:4] == [7, 9]
        and result.loss_mask.tolist()[:6] == [False] * 2 + [True] * 2 + [False] * 2
    )


def test_micro_batches_are_built_on_access_and_the_last_one_is_cached() -> None:
    made: list[int] = []
    one_sample = to_training_sample([1], [2], [-0.5], 1.0)

    def make(index: int) -> MicroBatch:
        made.append(index)
        return pack([one_sample] * (index + 1))

    batches = MicroBatches(3, make)
    assert len(batches) == 3 and made == []
    first = batches[1]
    assert batches[1] is first and made == [1]
    assert [len(batch.tokens) for batch in batches] == [1, 2, 3] and made == [1, 0, 1, 2]
    assert [len(batch.tokens) for batch in batches[1:]] == [2, 3] and len(batches[-1].tokens) == 3
    twice = batches.map(lambda batch: replace(batch, num_padding=7))
    assert twice[0].num_padding == 7 and batches[0].num_padding == 0
    with pytest.raises(IndexError):
        batches[3]
