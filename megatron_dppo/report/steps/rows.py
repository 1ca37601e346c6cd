"""Columns of a step's file: one row per sample, with lists of its response tokens.

A file contains everything that the update was computed from, so that it can be recomputed, and the decision for each
token. A list has one entry per response token, including tokens that did not train.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from megatron_dppo.types import (
    Completion,
    FinishReason,
    GreedyResponse,
    Prompt,
    Rollout,
    RolloutGroup,
    SegmentCredit,
    ToolTime,
    VersionSpan,
)
from megatron_dppo.types.token_columns import response_from_record, response_to_record

StepRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Results of the update for one sample of R response tokens, on the CPU."""

    update: int | None
    """Index of the last update of the step that trained on it, from 0. None if unknown."""
    policy_version: int | None
    """Version of the policy before that update, from which tokens have their ages. None if unknown."""
    loss_mask: Tensor
    """True for tokens that trained. Shape [R], bool."""
    advantages: Tensor
    """Advantages as the loss received them. Shape [R], fp32."""
    logprobs: Tensor | None
    """Log-probability pi before that update, NaN for tokens that did not train. Shape [R], fp32."""
    keep: Tensor | None
    """True for tokens with a gradient; other tokens of the loss mask were masked by the trust region. Shape [R]."""


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """Samples that one data-parallel rank collected in a step."""

    dp_rank: int
    groups: Sequence[RolloutGroup]
    ages: Sequence[int]
    """Age of each group in rollout steps. Shape [num_groups]."""
    trained: Sequence[TrainedTokens]
    """Results for each sample, with the samples of a group adjacent."""


def step_columns(step: int, parts: Iterable[RankSamples]) -> dict[str, list[object]]:
    """Return the rows of a step, column by column; lists of numbers are arrays."""
    result: dict[str, list[object]] = {}
    number = group_number = 0
    for part in parts:
        trained = iter(part.trained)
        for group, age in zip(part.groups, part.ages, strict=True):
            baseline = {"greedy": None if group.greedy is None else asdict(group.greedy)}
            for rollout in group.rollouts:
                position = {"step": step, "sample": number, "group": group_number, "dp_rank": part.dp_rank, "age": age}
                for name, value in {**position, **_row(rollout), **_trained(next(trained)), **baseline}.items():
                    result.setdefault(name, []).append(value)
                number += 1
            group_number += 1
    return result


def _row(rollout: Rollout) -> dict[str, object]:
    prompt = rollout.prompt
    completion = rollout.completion
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "label": prompt.label,
        "response": completion.text,
        "reward": rollout.reward,
        "reward_failed": rollout.reward_failed,
        "reward_parts": [{"name": name, "value": value} for name, value in rollout.reward_parts.items()],
        "eval_score": rollout.eval_score,
        "finish_reason": str(completion.finish_reason),
        "failure": completion.failure,
        "segment_lengths": list(completion.segment_lengths),
        "tool_times": [each._asdict() for each in completion.tool_times],
        "segment_credits": [each._asdict() for each in completion.segment_credits],
        "policy_version": completion.policy_version,
        "policy_versions": [span._asdict() for span in completion.policy_versions],
        "prompt_ids": list(prompt.token_ids),
        **response_to_record(completion),
        "prompt_metadata": json.dumps(dict(prompt.metadata), default=repr),
        "prompt_messages": None if prompt.messages is None else json.dumps(prompt.messages, default=repr),
        "is_task": prompt.is_task,
    }


def _trained(tokens: TrainedTokens) -> dict[str, object]:
    return {
        "update": tokens.update,
        "trained_policy_version": tokens.policy_version,
        "loss_mask": tokens.loss_mask.numpy(),
        "advantages": tokens.advantages.numpy(),
        "logprobs": None if tokens.logprobs is None else tokens.logprobs.numpy(),
        "keep": None if tokens.keep is None else tokens.keep.numpy(),
    }


def groups_from_rows(rows: Sequence[StepRow]) -> tuple[list[RolloutGroup], list[int]]:
    """Return the recorded groups in their order, and their ages."""
    groups: dict[int, list[Rollout]] = {}
    baselines: dict[int, GreedyResponse | None] = {}
    ages: dict[int, int] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(_rollout(row))
        # Files of earlier versions have no such column.
        greedy = row.get("greedy")
        baselines[row["group"]] = None if greedy is None else GreedyResponse(**greedy)
        ages[row["group"]] = row["age"]
    rollout_groups = [
        RolloutGroup(prompt=rollouts[0].prompt, rollouts=tuple(rollouts), greedy=baselines[number])
        for number, rollouts in groups.items()
    ]
    return rollout_groups, list(ages.values())


def _rollout(row: StepRow) -> Rollout:
    messages = row["prompt_messages"]
    return Rollout(
        prompt=Prompt(
            prompt_id=row["prompt_id"],
            text=row["prompt"],
            token_ids=tuple(row["prompt_ids"]),
            label=row["label"],
            metadata=json.loads(row["prompt_metadata"]),
            messages=None if messages is None else tuple(json.loads(messages)),
            is_task=row["is_task"],
        ),
        completion=_completion(row),
        reward=row["reward"],
        reward_failed=row["reward_failed"],
        reward_parts={part["name"]: part["value"] for part in row["reward_parts"]},
        eval_score=row["eval_score"],
    )


def _completion(row: StepRow) -> Completion:
    columns: dict[str, Any] = response_from_record(row, len(row["response_ids"]))
    return Completion(
        **columns,
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
        text=row["response"],
        policy_versions=tuple(VersionSpan(**span) for span in row["policy_versions"]),
        failure=row["failure"],
        # Files of older versions have no such column.
        segment_lengths=tuple(row.get("segment_lengths") or ()),
        tool_times=tuple(
            ToolTime(each["position"], each["seconds"], tuple(each["tools"])) for each in row.get("tool_times") or ()
        ),
        segment_credits=tuple(SegmentCredit(**each) for each in row.get("segment_credits") or ()),
    )
