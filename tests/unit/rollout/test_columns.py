"""The comparison that other tests rely on sees every difference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from columns import ids, logs, mask, same
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, VersionSpan
from megatron_dppo_engines.server import Echo, Generation


def completion() -> Completion:
    return Completion(
        token_ids=ids([5, 2]),
        logprobs=logs([-0.1, math.nan]),
        finish_reason=FinishReason.STOP,
        policy_version=3,
        text="x",
        topk_token_ids=torch.tensor([[5, -1], [4, 2]], dtype=torch.int32),
        policy_versions=(VersionSpan(3, 0, 2),),
        loss_mask=mask([True, False]),
    )


def group(last: Completion) -> RolloutGroup:
    prompt = Prompt(prompt_id="p", text="p", token_ids=(1,), label="", metadata={"row": {"a": 1}})
    rollouts = [Rollout(prompt=prompt, completion=c, reward=1.0, reward_parts={"a": 1.0}) for c in (completion(), last)]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_columns_have_the_types_of_the_records() -> None:
    columns = (ids([1]), logs([1]), mask([1]), ids([]), logs([]), mask([]))
    assert [c.dtype for c in columns] == [torch.int32, torch.float32, torch.bool] * 2
    assert [c.tolist() for c in columns] == [[1], [1.0], [True], [], [], []]


def test_records_made_twice_are_the_same_although_not_equal() -> None:
    assert completion() != completion() and same(completion(), completion())
    assert same(group(completion()), group(completion())) and same([completion()], [completion()])
    assert same((None, math.nan, {"a": ids([1])}), (None, math.nan, {"a": ids([1])}))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": ids([5, 3])},
        {"token_ids": ids([5, 2]).long()},
        {"token_ids": ids([5])},
        {"token_ids": ids([5, 2])[None]},
        {"token_ids": (5, 2)},
        {"logprobs": None},
        {"logprobs": logs([-0.1, 0.0])},
        {"logprobs": logs([np.nextafter(np.float32(-0.1), np.float32(0)), math.nan])},
        {"finish_reason": FinishReason.LENGTH},
        {"policy_version": 4},
        {"text": "y"},
        {"topk_token_ids": torch.tensor([[5, -1], [4, 3]], dtype=torch.int32)},
        {"topk_logprobs": torch.zeros(2, 2)},
        {"policy_versions": (VersionSpan(3, 0, 1), VersionSpan(3, 1, 2))},
        {"policy_versions": [VersionSpan(3, 0, 2)]},
        {"loss_mask": mask([True, True])},
        {"reward": 0.0},
    ],
    ids=str,
)
def test_a_difference_anywhere_is_seen_at_any_depth(change: dict[str, object]) -> None:
    other = replace(completion(), **change)  # type: ignore[arg-type]
    for left, right in ((completion(), other), (group(completion()), group(other)), ([completion()], [other])):
        assert not same(left, right) and not same(right, left)


def test_other_kinds_and_lengths_are_different() -> None:
    a, b = Generation.empty(FinishReason.ABORT), Generation.empty(FinishReason.ABORT, Echo(best_token_ids=np.ones(2)))
    assert same(a, a) and same(b, b) and not same(a, b) and not same(a, completion())
    assert not same([a], [a, a]) and not same([], [a]) and not same({"a": a}, {"b": a}) and not same(None, ids([]))
    assert not same(b, Generation.empty(FinishReason.ABORT, Echo(best_token_ids=np.zeros(2))))
