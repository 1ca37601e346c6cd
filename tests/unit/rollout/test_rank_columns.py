"""Columns of the rollouts that a rank of another pipeline stage gets."""

from __future__ import annotations

from dataclasses import replace

import torch

from columns import ids, logs, same
from megatron_dppo.rollout.batch import RankColumns
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, SamplingMask

PROMPT = Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
COMPLETION = Completion(
    token_ids=ids([5, 6]),
    logprobs=logs([-0.5, -0.25]),
    finish_reason=FinishReason.STOP,
    policy_version=3,
    text="x",
    topk_token_ids=ids([5, -1, 6, -1]).view(2, 2),
    topk_logprobs=logs([-0.5, 0, -0.25, 0]).view(2, 2),
    sampling_mask=SamplingMask(ids([5, 9, 6]), ids([2, 1])),
    routed_experts=torch.arange(24, dtype=torch.uint8).view(3, 4, 2),
)


def group(completion: Completion) -> RolloutGroup:
    rollouts = (Rollout(prompt=PROMPT, completion=completion, reward=1.0, reward_parts={"score": 2.0}),)
    return RolloutGroup(prompt=PROMPT, rollouts=rollouts)


def test_a_rank_gets_only_the_optional_columns_that_it_reads() -> None:
    assert same(RankColumns().select([group(COMPLETION), None]), [group(COMPLETION), None])
    middle = replace(
        COMPLETION,
        topk_token_ids=None,
        topk_logprobs=None,
        sampling_mask=None,
        routed_experts=torch.tensor([[[2, 3], [6, 7]], [[10, 11], [14, 15]], [[18, 19], [22, 23]]], dtype=torch.uint8),
    )
    assert same(RankColumns(topk=False, layers=(1, 3)).select([None, group(COMPLETION)]), [None, group(middle)])
    plain = replace(COMPLETION, routed_experts=None)
    assert same(RankColumns(topk=True, layers=(0,)).select([group(plain)]), [group(plain)])
