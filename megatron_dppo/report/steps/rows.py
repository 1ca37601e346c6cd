"""The columns of a step's file: one row a sample, lists of its response tokens.

Everything that the update was computed from is there, so that it can be computed again, and what it decided of each
token. A list has one entry for each response token, whether it trained or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_dppo.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    VersionSpan,
)
from megatron_dppo.types.token_columns import response_from_record, response_to_record


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """What a step made of one sample of R response tokens; the lists are aligned to them, on the CPU."""

    update: int | None
    """of the step, from 0: the last one that trained on it; None = not known"""
    loss_mask: Tensor
    """[R] bool, True on tokens that trained"""
    advantages: Tensor
    """[R] fp32, as the loss got them"""
    logprobs: Tensor | None
    """[R] fp32, log pi before that update; NaN where a token did not train"""
    keep: Tensor | None
    """[R] bool, True = the token had a gradient; the others of the loss mask were masked by the trust region"""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The samples that one data-parallel rank collected in a step."""

    dp_rank: int
    groups: Sequence[RolloutGroup]
    ages: Sequence[int]
    """of each group, in rollout steps"""
    trained: Sequence[TrainedTokens]
    """of each sample, siblings side by side"""


def columns(step: int, parts: Iterable[RankPart]) -> dict[str, list[Any]]:
    """The rows of a step, column by column; lists of numbers as arrays."""
    result: dict[str, list[Any]] = {}
    number = group_number = 0
    for part in parts:
        trained = iter(part.trained)
        for group, age in zip(part.groups, part.ages, strict=True):
            for rollout in group.rollouts:
                place = {"step": step, "sample": number, "group": group_number, "dp_rank": part.dp_rank, "age": age}
                for name, value in {**place, **_row(rollout), **_trained(next(trained))}.items():
                    result.setdefault(name, []).append(value)
                number += 1
            group_number += 1
    return result


def _row(rollout: Rollout) -> dict[str, Any]:
    prompt, done = rollout.prompt, rollout.completion
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "label": prompt.label,
        "response": done.text,
        "reward": rollout.reward,
        "reward_failed": rollout.reward_failed,
        "reward_parts": [{"name": name, "value": value} for name, value in rollout.reward_parts.items()],
        "eval_score": rollout.eval_score,
        "finish_reason": str(done.finish_reason),
        "failure": done.failure,
        "policy_version": done.policy_version,
        "policy_versions": [span._asdict() for span in done.policy_versions],
        "prompt_ids": list(prompt.token_ids),
        **response_to_record(done),
        "prompt_metadata": json.dumps(dict(prompt.metadata), default=repr),
        "prompt_messages": None if prompt.messages is None else json.dumps(prompt.messages, default=repr),
        "is_task": prompt.is_task,
    }


def _trained(tokens: TrainedTokens) -> dict[str, Any]:
    return {
        "update": tokens.update,
        "loss_mask": tokens.loss_mask.numpy(),
        "advantages": tokens.advantages.numpy(),
        "logprobs": None if tokens.logprobs is None else tokens.logprobs.numpy(),
        "keep": None if tokens.keep is None else tokens.keep.numpy(),
    }


def groups_of(rows: Sequence[dict[str, Any]]) -> tuple[list[RolloutGroup], list[int]]:
    """The groups that were written, in their order, and their ages.

    Args:
        rows: some whole groups, as ``files.read_rows`` gives them.
    """
    groups: dict[int, list[Rollout]] = {}
    ages: dict[int, int] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(_rollout(row))
        ages[row["group"]] = row["age"]
    return [RolloutGroup(prompt=own[0].prompt, rollouts=tuple(own)) for own in groups.values()], list(ages.values())


def _rollout(row: dict[str, Any]) -> Rollout:
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


def _completion(row: dict[str, Any]) -> Completion:
    return Completion(
        **response_from_record(row, len(row["response_ids"])),
        finish_reason=FinishReason(row["finish_reason"]),
        policy_version=row["policy_version"],
        text=row["response"],
        policy_versions=tuple(VersionSpan(**span) for span in row["policy_versions"]),
        failure=row["failure"],
    )
