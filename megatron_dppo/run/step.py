"""One step's update: rewards to advantages to samples, and the optimizer updates on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.samples import to_samples
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.errors import ServerError
from megatron_dppo.losses import advantages_by
from megatron_dppo.losses.parts.returns import Moments, kl_estimate, returns_to_go
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import from_each, from_leader
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import reduce_metrics, reduce_over_samples
from megatron_dppo.rollout.batch import Collected
from megatron_dppo.rollout.requests import sampling_seed
from megatron_dppo.run.guard import FirstUpdateGuard, dropped_tokens
from megatron_dppo.run.recording import StepRecord
from megatron_dppo.types import FinishReason, Metric, RolloutGroup, StepResult, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.teacher_model import TeacherModel
    from megatron_dppo.policy.trainer import PolicyTrainer


def make_samples(groups: Sequence[RolloutGroup], train: TrainConfig) -> list[TrainingSample]:
    """Rewards to group-relative advantages to training samples."""
    samples = to_samples(groups, group_advantages(groups, train).tolist())
    if not train.mask_truncated:
        return samples
    cut = [r.completion.finish_reason == FinishReason.LENGTH for group in groups for r in group.rollouts]
    return [
        replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) if is_cut else sample
        for sample, is_cut in zip(samples, cut, strict=True)
    ]


def update_policy(
    trainer: PolicyTrainer,
    config: Config,
    teacher: TeacherModel | TeacherServers | None,
    step: int,
    collected: Collected,
    samples: Sequence[TrainingSample],
    clock: Clock,
    record: StepRecord | None = None,
    parts: Callable[[int], list[list[int]]] | None = None,
) -> list[StepResult]:
    """One optimizer update for each mini-batch of each epoch.

    Args:
        trainer: policy of this rank.
        config: configuration of the run.
        teacher: teacher of a distillation, if there is one.
        step: rollout steps done before this one.
        collected: rollouts of this rank.
        samples: what ``make_samples`` made of them.
        clock: gets the time of each part.
        record: gets what the updates saw of each token; None = nobody wants it.
        parts: the samples of each mini-batch of an epoch; None = by the run's seed.

    Raises:
        TrainingStopped: the rollouts are not those of the policy; nothing was updated.
    """
    trainer.optimizer.set_step(step)
    exact = config.distillation.is_exact
    inside = None if isinstance(teacher, TeacherServers) else teacher
    updater = Updater(
        trainer,
        config.train,
        config.loss,
        with_reference=config.needs_reference,
        teacher=inside if exact else None,
        score=None if exact else inside,
        watch=None if record is None else record.watch,
    )
    guard = first_update_guard(trainer.groups, config, collected)
    samples = updater.add_recomputed(samples, clock)
    if isinstance(teacher, TeacherServers):
        with clock.part("recompute"):
            samples = scored(samples, teacher, trainer.groups.replica)
    with clock.part("waiting"):  # for the slowest rank's rollouts, where all ranks' are needed
        samples = refined_advantages(samples, collected.groups, config.train, config.reward, group=trainer.groups.dp)
        own = teacher_metrics(samples, trainer.groups) if teacher is not None and not exact else {}
        samples = samples if teacher is None else taught_advantages(samples, config.distillation)
    if record is not None:
        samples = record.numbered(samples, trainer.dp_rank)
    seed = sampling_seed(config.run.seed, "order", step, trainer.dp_rank)
    results = list(updater.run(samples, seed, clock, guard, parts))
    if config.reward.kl_coef:
        own |= kl_metrics(samples, config.reward, trainer.groups)
    if own:
        results[0] = replace(results[0], metrics={**results[0].metrics, **own})
    return results


def first_update_guard(groups: ParallelGroups, config: Config, collected: Collected) -> FirstUpdateGuard:
    """Return the guard of this step's first update; a collective over all ranks."""
    local = {
        "dropped": dropped_tokens(collected.groups),
        "oldest": Metric(max(collected.token_ages, default=0), kind="max"),
    }
    found = reduce_over_samples(groups, local)
    return FirstUpdateGuard.of(
        config.train, config.rollout, config.model, dropped=found["dropped"], on_policy=found["oldest"] == 0
    )


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


def scored(
    samples: Sequence[TrainingSample], servers: TeacherServers, group: ProcessGroup | None
) -> list[TrainingSample]:
    """The samples with ``teacher_logprobs``; a collective of the ranks that have the same ones, whose first one asks.

    Raises:
        ServerError: on all of them.
    """

    def ask() -> tuple[list[Tensor], str]:
        try:
            return servers.logprobs(samples), ""
        except ServerError as error:
            return [], str(error)

    found, problem = from_leader(ask, group)
    if problem:
        raise ServerError("distillation.teacher_urls", problem)
    return [replace(sample, teacher_logprobs=row) for sample, row in zip(samples, found, strict=True)]
