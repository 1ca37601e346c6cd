"""Advantages of a batch: of each group's rewards, less a KL penalty, over the deviation of all ranks' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.losses import advantages_by
from megatron_dppo.losses.returns import Moments, kl_estimate, returns_to_go
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import from_each
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.types import Metric, RolloutGroup, TrainingSample


def group_advantages(groups: Sequence[RolloutGroup], train: TrainConfig, taken: Tensor | None = None) -> Tensor:
    """``[groups, samples]`` by ``train.advantage``, of the rewards less what is ``taken [groups, samples]`` of them."""
    rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
    if taken is not None:
        rewards = rewards - taken
    return advantages_by(train.advantage, rewards, _valid(groups), options=train.advantage_options, groups=groups)


def refined_advantages(
    samples: Sequence[TrainingSample],
    groups: Sequence[RolloutGroup],
    train: TrainConfig,
    reward: RewardConfig,
    *,
    group: ProcessGroup | None,
) -> list[TrainingSample]:
    """The samples with advantages that take more than the groups' rewards; a collective of the data-parallel ranks.

    With ``reward.kl_coef`` a token's reward is ``-kl_coef * KL_t``, mu against the reference, and the response's score
    comes with its last token. Advantages of groups are of the sums over a response. With ``train.advantage = "none"``
    each token has the sum from itself on (REINFORCE++, arXiv 2501.03262).

    Args:
        samples: of this rank, siblings side by side, in the order of the groups; with ``reference_logprobs`` for a
            penalty, but on pipeline stages that compute no loss.
        groups: their rollouts.
        train: how advantages are formed.
        reward: the KL penalty.
        group: the data-parallel ranks; None = this one alone.
    """
    result = list(samples)
    valid = _valid(groups).flatten().tolist()
    if reward.kl_coef and result:
        penalties = [kl_penalty(sample, reward) for sample in result]
        if train.advantage == "none":
            values = [sample.advantages - returns_to_go(p) for sample, p in zip(result, penalties, strict=True)]
        else:
            taken = torch.stack([penalty.sum() for penalty in penalties]).view(len(groups), -1)
            values = list(group_advantages(groups, train, taken).flatten())
        result = [_with(*each) for each in zip(result, values, valid, strict=True)]
    return _whitened(result, valid, group) if train.advantage_normalization == "batch" else result


def taught_advantages(samples: Sequence[TrainingSample], distillation: DistillationConfig) -> list[TrainingSample]:
    """The samples with advantages that have the teacher's part by ``[distillation]``, and no ``teacher_logprobs``.

    With ``divergence = "sampled"`` that of a token is ``coef`` times log teacher - log mu, at most 20 either way: the
    gradient of KL(policy || teacher) at each position for itself. It is no part of a mean or deviation of the group,
    and a sample whose reward failed has it too. Without ``task_reward`` the rest is 0.
    """
    result = []
    for sample in samples:
        values = sample.advantages if distillation.task_reward else torch.zeros_like(sample.advantages)
        if sample.teacher_logprobs is not None:
            values = values - distillation.coef * _distance(sample)
        result.append(replace(_with(sample, values, is_valid=True), teacher_logprobs=None))
    return result


def teacher_metrics(samples: Sequence[TrainingSample], groups: ParallelGroups) -> dict[str, float]:
    """``teacher_reverse_kl``: the mean of log mu - log teacher of all ranks' tokens; a collective.

    ``samples`` still have their ``teacher_logprobs``, where the pipeline stage computes them.
    """
    first = dist.get_rank(groups.tp) == 0 and dist.get_rank(groups.cp) == 0
    known = [sample for sample in samples if sample.teacher_logprobs is not None]
    total = sum(float(_distance(sample).sum()) for sample in known)
    mean = Metric(total, sum(int(sample.loss_mask.sum()) for sample in known))
    return reduce_metrics([{"teacher_reverse_kl": mean}], groups.world, contributes=first)


def _distance(sample: TrainingSample) -> Tensor:
    """``[T]`` log mu - log teacher, 0 outside the loss mask."""
    assert sample.teacher_logprobs is not None and sample.rollout_logprobs is not None
    return torch.where(sample.loss_mask, kl_estimate(sample.rollout_logprobs, sample.teacher_logprobs, "k1"), 0.0)


def kl_penalty(sample: TrainingSample, reward: RewardConfig) -> Tensor:
    """``[T]`` what the KL to the reference takes from the reward of each token; 0 where the sample has no reference."""
    reference = sample.reference_logprobs
    own = sample.rollout_logprobs
    if reference is None or own is None:
        return torch.zeros(sample.num_tokens)
    penalty = reward.kl_coef * kl_estimate(own, reference, reward.kl_estimator)
    return torch.where(sample.loss_mask, penalty, 0.0)


def kl_metrics(samples: Sequence[TrainingSample], reward: RewardConfig, groups: ParallelGroups) -> dict[str, float]:
    """``kl_in_reward``: the mean estimate of a token of all ranks, before ``reward.kl_coef``; a collective."""
    first = dist.get_rank(groups.tp) == 0 and dist.get_rank(groups.cp) == 0
    known = [sample for sample in samples if sample.reference_logprobs is not None]
    total = sum(float(kl_penalty(sample, reward).sum()) for sample in known) / reward.kl_coef
    mean = Metric(total, sum(int(sample.loss_mask.sum()) for sample in known))
    return reduce_metrics([{"kl_in_reward": mean}], groups.world, contributes=first)


def _whitened(
    samples: Sequence[TrainingSample], valid: Sequence[bool], group: ProcessGroup | None
) -> list[TrainingSample]:
    """The advantages over the mean and deviation of all ranks' tokens; failed rewards stay at 0 and do not count."""
    own = [s.advantages[s.loss_mask] for s, is_valid in zip(samples, valid, strict=True) if is_valid]
    moments = reduce(add, from_each(Moments.of(torch.cat([torch.empty(0), *own])), group))
    return [_with(s, moments.whiten(s.advantages), is_valid) for s, is_valid in zip(samples, valid, strict=True)]


def _with(sample: TrainingSample, values: Tensor, is_valid: bool) -> TrainingSample:
    mask = sample.loss_mask if is_valid else torch.zeros_like(sample.loss_mask)
    return replace(sample, advantages=torch.where(mask, values, 0.0))


def _valid(groups: Sequence[RolloutGroup]) -> Tensor:
    return torch.tensor([[not r.reward_failed for r in group.rollouts] for group in groups])
