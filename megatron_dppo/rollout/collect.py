"""Prompts to scored groups, groups to training samples."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.types import (
    Completion,
    FinishReason,
    Metric,
    Prompt,
    Rollout,
    RolloutGroup,
    TrainingSample,
)
from megatron_dppo.types.token_columns import carried_columns


def score_completions(
    scorer: RewardScorer, prompts: Sequence[Prompt], completions: Sequence[Completion], *, is_batch: bool = True
) -> list[RolloutGroup]:
    """The scored group of each prompt; ``completions`` of siblings side by side, as many of each prompt.

    A completion that has a reward keeps it; the reward function and its shaping are for the others. ``is_batch`` as in
    ``RewardScorer.score``.

    Raises:
        RewardError: see ``RewardScorer.score``.
    """
    n = len(completions) // max(1, len(prompts))
    repeated = [prompt for prompt in prompts for _ in range(n)]
    items = [
        RewardItem(
            prompt=prompt.text,
            completion=completion.text,
            label=prompt.label,
            # A plain string: a scoring process would import torch to unpickle the enum, in the first sample's time.
            metadata={**prompt.metadata, "finish_reason": str(completion.finish_reason)},
            token_ids=tuple(completion.token_ids.tolist()),
            messages=prompt.messages,
        )
        for prompt, completion in zip(repeated, completions, strict=True)
        if not _is_settled(completion)
    ]
    scored = iter(scorer.score(items, is_batch=is_batch))
    results = [_settled(c) if _is_settled(c) else next(scored) for c in completions]
    rollouts = [
        Rollout(
            prompt=prompt,
            completion=completion,
            reward=result.reward,
            reward_failed=result.failed,
            reward_parts=result.parts,
            eval_score=result.eval_score,
        )
        for prompt, completion, result in zip(repeated, completions, results, strict=True)
    ]
    return [RolloutGroup(prompt=p, rollouts=tuple(rollouts[i * n : (i + 1) * n])) for i, p in enumerate(prompts)]


def _is_settled(completion: Completion) -> bool:
    return bool(completion.failure) or completion.reward is not None


def _settled(completion: Completion) -> RewardResult:
    failed = bool(completion.failure)
    return RewardResult(reward=0.0 if failed else completion.reward or 0.0, failed=failed, error=completion.failure)


def to_samples(groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]) -> list[TrainingSample]:
    """One training sample a rollout; a sample whose reward failed has advantage 0 and so no gradient.

    Args:
        groups: scored groups.
        advantages: ``[groups][samples]``.
    """
    return [
        _to_sample(group.prompt, rollout.completion, float(advantage))
        for group, row in zip(groups, advantages, strict=True)
        for rollout, advantage in zip(group.rollouts, row, strict=True)
    ]


def _to_sample(prompt: Prompt, completion: Completion, advantage: float) -> TrainingSample:
    first = _given_first(completion) if prompt.is_task else 0
    return to_training_sample(
        (*prompt.start, *completion.token_ids[:first].tolist()),
        completion.token_ids[first:],
        None if completion.logprobs is None else completion.logprobs[first:],
        advantage,
        sampled=None if completion.loss_mask is None else completion.loss_mask[first:],
        columns=carried_columns(completion, first),
    )


def _given_first(completion: Completion) -> int:
    """How many tokens were given before the first one was sampled: an agent's prompt."""
    assert completion.loss_mask is not None, "an agent's sequence begins with what it asks"
    return int(completion.loss_mask.int().argmax())


def rollout_metrics(groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """What the rollouts look like; numerators and denominators of this rank."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [r for r in rollouts if not r.reward_failed]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    reasons = [r.completion.finish_reason for r in rollouts]
    flat = [len({r.reward for r in group.rollouts if not r.reward_failed}) < 2 for group in groups]
    masks = [r.completion.loss_mask for r in rollouts]
    sampled = sum(n if m is None else int(m.sum()) for m, n in zip(masks, lengths, strict=True))
    kept = sum(int(s.loss_mask.sum()) for s in samples)
    sets = [r.completion.kept for r in rollouts if r.completion.kept is not None]
    of_sets = {"kept_ids": Metric(sum(len(s.ids) for s in sets), sampled)} if sets else {}
    return {
        "reward": Metric(sum(r.reward for r in scored), len(scored)),
        **_part_metrics(scored),
        "reward_failed_fraction": Metric(len(rollouts) - len(scored), len(rollouts)),
        "response_length": Metric(sum(lengths), len(rollouts)),
        "response_length_max": Metric(max(lengths, default=0), kind="max"),
        **{f"finish/{reason}": Metric(reasons.count(reason), len(rollouts)) for reason in FinishReason},
        "groups_without_signal": Metric(sum(flat), len(groups)),
        "dropped_token_fraction": Metric(sampled - kept, sampled),
        "given_token_fraction": Metric(sum(lengths) - sampled, sum(lengths)),
        **of_sets,
        **_count_metrics(rollouts),
    }


def _count_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """The mean of each count over the samples that have it."""
    counts = [rollout.completion.counts for rollout in rollouts]
    names = sorted({name for each in counts for name in each})
    return {name: Metric(sum(c[name] for c in counts if name in c), sum(name in c for c in counts)) for name in names}


def _part_metrics(scored: Sequence[Rollout]) -> dict[str, Metric]:
    """The mean of each named part over the samples that have it."""
    values: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward/{name}": Metric(sum(values[name]), len(values[name])) for name in sorted(values)}
