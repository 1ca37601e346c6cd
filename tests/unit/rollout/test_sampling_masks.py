"""The column of sampling masks: picked, joined, packed, saved, grown, and cut out of logits, against plain lists."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.head.vocab_topk import keep_only, keep_only_
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import FinishReason, Prompt, SamplingMask, SamplingParams, TrainingSample, VersionSpan
from megatron_dppo.types.token_columns import requested_columns
from megatron_dppo_engines.server import Generation

Lists = list[list[int]]
SETS: Lists = [[4, 2], [], [9], [1, 0, 7, 3], [5, 6]]


def column(sets: Lists) -> SamplingMask:
    ids = torch.tensor([i for part in sets for i in part], dtype=torch.int32)
    return SamplingMask(ids, torch.tensor([len(part) for part in sets], dtype=torch.int32))


def lists(sampling_mask: SamplingMask | None) -> Lists:
    assert sampling_mask is not None and sampling_mask.ids.dtype == sampling_mask.counts.dtype == torch.int32
    return [part.tolist() for part in sampling_mask.ids.split(sampling_mask.counts.tolist())]


def test_rows_are_picked_as_from_a_list() -> None:
    sampling_mask = column(SETS)
    assert lists(sampling_mask) == SETS and len(sampling_mask) == 5
    for part in (slice(None), slice(1, 4), slice(-2, None), slice(3, 3), slice(0, 99)):
        assert lists(sampling_mask[part]) == SETS[part]
    for chosen in ([3, 0, 0, 2], [1], [], [4, 3, 2, 1, 0]):
        assert lists(sampling_mask[torch.tensor(chosen, dtype=torch.int64)]) == [SETS[i] for i in chosen]
    assert lists(sampling_mask[torch.tensor([True, False, False, True, False])]) == [SETS[0], SETS[3]]
    assert lists(SamplingMask.cat([sampling_mask, SamplingMask.none(2), sampling_mask[:1]])) == [*SETS, [], [], SETS[0]]


def sample(sets: Lists) -> TrainingSample:
    return to_training_sample([1, 2, 3], [5] * len(sets), [-0.5] * len(sets), 1.0, sampling_mask=column(sets))


def test_a_packed_row_has_each_set_at_its_label_and_none_elsewhere() -> None:
    row = pack([sample(SETS), sample(SETS[2:4])], RowShape(row_multiple=32, sequence_multiple=8))
    expected: Lists = [[], [], *SETS, [], [], [], SETS[2], SETS[3], *[[]] * 4, *[[]] * 16]
    assert lists(row.sampling_mask) == expected
    index = torch.tensor([10, 3, 2])
    assert lists(row.select(index).sampling_mask) == [expected[i] for i in index.tolist()]
    assert lists(row.to(torch.device("cpu")).sampling_mask) == expected
    assert lists(pack([], RowShape(row_multiple=4), like=sample(SETS)).sampling_mask) == [[]] * 4


def test_masks_of_the_wrong_shape_are_refused() -> None:
    plain = to_training_sample([1], [5], [-0.5], 1.0)
    with pytest.raises(ValueError, match="with and without sampling_mask"):
        pack([sample(SETS), plain])
    for sampling_mask, message in (
        (column(SETS), r"counts \[4\] are expected, one a token, got torch.int32 \[9\] and torch.int32 \[5\]"),
        (
            SamplingMask(torch.zeros(3).int(), torch.tensor([1, 1, 1, 1]).int()),
            "4 in all, expected 0 or more, and the 3 ids",
        ),
        (SamplingMask(torch.zeros(1).int(), torch.tensor([-1, 1, 1, 0]).int()), "-1 at least"),
        (SamplingMask(torch.zeros(4), torch.ones(4).int()), "got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            to_training_sample([1], [5] * 4, [-0.5] * 4, 1.0, sampling_mask=sampling_mask)


def generation(sets: Lists, sampling_mask: bool = True) -> Generation:
    n = len(sets)
    tokens = torch.tensor([part[0] for part in sets], dtype=torch.int32)
    spans = (VersionSpan(0, 0, n),)
    own = column(sets) if sampling_mask else None
    return Generation(
        token_ids=tokens, logprobs=torch.zeros(n), finish_reason=FinishReason.ABORT, versions=spans, sampling_mask=own
    )


class Tokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return ""


MASKS = requested_columns(SamplingParams(max_new_tokens=1, return_sampling_mask=True))


def test_a_response_of_parts_keeps_the_sets_of_each_through_cuts_and_a_checkpoint(tmp_path: Path) -> None:
    response = GrowingResponse((1, 2), columns=MASKS)
    response.append_sampled(generation([[4, 2], [9]]))
    response.append_unsampled([7, 7])
    response.append_sampled(generation([[1, 0], [5]]))
    response.truncate(5)
    state, prompt = response.state(), Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
    save_groups(tmp_path / "f.safetensors", [StoredRollouts(0, prompt, (state,))])
    content = load_groups(tmp_path / "f.safetensors", lambda _: prompt)[0].content
    assert isinstance(content, tuple) and isinstance(content[0], PartialResponse)
    other = GrowingResponse((1, 2), columns=MASKS)
    other.restore(content[0])
    other.append_sampled(generation([[8, 3]]))
    done = other.completion(FinishReason.LENGTH, Tokenizer())
    assert lists(done.sampling_mask) == [[4, 2], [9], [], [], [1, 0], [8, 3]]
    assert other.tokens == array("i", [4, 9, 7, 7, 1, 8])
    with pytest.raises(ValueError, match="without the sampling_mask"):
        other.append_sampled(generation([[1]], sampling_mask=False))
    plain = GrowingResponse((1, 2))
    plain.append_sampled(generation([[4]], sampling_mask=False))
    assert plain.completion(FinishReason.LENGTH, Tokenizer()).sampling_mask is None
    with pytest.raises(ValueError, match="masks of this"):
        GrowingResponse((1, 2), columns=MASKS).restore(plain.state())


@pytest.mark.parametrize(("first", "own"), [(0, 10), (0, 7), (5, 5), (5, 2), (8, 2), (20, 0)])
def test_tokens_outside_the_masks_are_removed_from_a_shard(first: int, own: int) -> None:
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, ids in enumerate(SETS):
        for place in range(10):
            if ids and not (place < own and first + place in ids):
                expected[row, place] = -torch.inf
    sampling_mask = column(SETS)
    assert torch.equal(keep_only(logits, sampling_mask.ids, sampling_mask.counts, first, own), expected)
    work = torch.cat([logits, logits])
    assert torch.equal(keep_only_(work[:5], sampling_mask.ids, sampling_mask.counts, first, own), expected)
    assert torch.equal(work[5:], logits)
