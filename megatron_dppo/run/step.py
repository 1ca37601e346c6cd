"""One training step: rewards to advantages, advantages to samples, samples to optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.advantages.group_relative import reward_scales
from megatron_dppo.advantages.groups import agent_advantages, compute_group_advantages, group_rewards, is_scored
from megatron_dppo.advantages.returns import Moments, returns_to_go
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.training_samples import episode_indices, to_samples
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.errors import ServerError
from megatron_dppo.losses.divergence import kl_estimate
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object
from megatron_dppo.policy.server_sums import without_servers
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.request_scheduler import sampling_seed
from megatron_dppo.run.guard_state import GuardState, leaves_loss
from megatron_dppo.run.recording import StepRecord
from megatron_dppo.run.run_state import RunState
from megatron_dppo.types import Metric, RolloutGroup, StepResult, TrainingSample
from megatron_dppo_engines.sampling_sums import RankSums

if TYPE_CHECKING:
    from megatron_dppo.mcore.teacher_model import MegatronTeacher
    from megatron_dppo.policy.trainer import PolicyTrainer


def make_samples(
    groups: Sequence[RolloutGroup], train: TrainConfig, reward: RewardConfig, *, has_teacher: bool = False
) -> list[TrainingSample]:
    """Turn scored groups into training samples with the advantages of ``train.advantage``."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scales = None
    if any(rollout.completion.past_rewards is not None for rollout in rollouts):
        scales = reward_scales(train.advantage, group_rewards(groups), is_scored(groups)).tolist()
    samples = to_samples(groups, compute_group_advantages(groups, train, reward).tolist(), scales)
    if any(rollout.completion.segment_credits for rollout in rollouts):
        samples = [
            _with_advantages(sample, torch.full_like(sample.advantages, advantage), is_scored=True)
            for sample, advantage in zip(samples, agent_advantages(groups, train.advantage), strict=True)
        ]
    # Responses without a signal keep their place in the batch, outside the loss: with an advantage of 0 alone, a KL
    # penalty or an entropy bonus would train their tokens, and N would count them.
    is_left_out = [leaves_loss(rollout, train, has_teacher=has_teacher) for rollout in rollouts]
    return [
        sample.without_loss() if is_left_out[episode] else sample
        for sample, episode in zip(samples, episode_indices(samples), strict=True)
    ]


@dataclass(frozen=True)
class StepBatch:
    """Rollouts of one step on this rank, and the samples to train on."""

    step: int
    """Steps done before this one."""
    collected: CollectedRollouts
    samples: Sequence[TrainingSample]
    """Result of ``make_samples`` for the rollouts."""
    ranks: Mapping[str, RankSums] = field(default_factory=dict)
    """Ranks of the tokens that this rank's engine got since the last step, by URL."""
    probed: Mapping[str, float] = field(default_factory=dict)
    """See ``Publisher``."""
    record: StepRecord | None = None
    """Receives the samples and what the updates compute for them. None records nothing."""


@dataclass
class PolicyUpdater:
    """Updates the policy of this rank, step by step, with the loss of the run.

    Long because it is the order of all phases of an update, a few lines for each.
    """

    trainer: PolicyTrainer
    config: Config
    teacher: MegatronTeacher | TeacherServers | None

    def step(
        self,
        batch: StepBatch,
        clock: Clock,
        *,
        state: RunState | None = None,
        mini_batches: Callable[[int], list[list[int]]] | None = None,
    ) -> list[StepResult]:
        """Apply one optimizer update per mini-batch and epoch, and return their results; a collective of all ranks.

        The run's state gets the servers that the guard excludes and counts skipped updates; None is a step by itself.
        ``mini_batches`` returns the indices of the rollouts of each mini-batch of an epoch; None shuffles by the run's
        seed.

        Raises:
            TrainingStopped: The rollouts do not fit the policy, or are no samples of it, and no server without a
                problem is left. No update was applied.
        """
        config, trainer = self.config, self.trainer
        # One learning rate for all updates of the step.
        trainer.optimizer.set_step(batch.step)
        state = state or RunState(guard=GuardState.from_config(config.rollout, config.train))
        state.guard.history.probed |= batch.probed
        guard = state.guard.begin_step(config, trainer.groups, batch.collected, batch.ranks)
        samples = [without_servers(sample, state.guard.excluded) for sample in batch.samples]

        updater = self._open_updater(batch.record)
        samples, metrics = self._complete(updater, samples, batch.collected.groups, clock)
        if batch.record is not None:
            samples = batch.record.number_samples(samples, trainer.dp_rank)

        # Data-parallel ranks have different samples, so each shuffles in an order of its own.
        seed = sampling_seed(config.run.seed, "order", batch.step, trainer.dp_rank)
        results = list(updater.run(samples, seed, clock, guard, mini_batches))
        state.guard.excluded |= updater.excluded
        state.count_skipped(results)

        # Metrics of the step stand with its first update.
        if config.reward.kl_coef:
            metrics |= compute_kl_metrics(samples, config.reward, trainer.groups)
        if metrics:
            results[0] = replace(results[0], metrics={**results[0].metrics, **metrics})
        return results

    def _open_updater(self, record: StepRecord | None) -> Updater:
        config = self.config
        is_exact = config.distillation.is_exact
        local_teacher = None if isinstance(self.teacher, TeacherServers) else self.teacher
        return Updater(
            self.trainer,
            config.train,
            config.loss,
            with_reference=config.needs_reference,
            teacher=local_teacher if is_exact else None,
            scoring_teacher=None if is_exact else local_teacher,
            recorder=None if record is None else record.watch,
            equal_segments=config.agent.segment_weight == "segments",
        )

    def _complete(
        self, updater: Updater, samples: list[TrainingSample], rollouts: Sequence[RolloutGroup], clock: Clock
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Return the samples with all columns and their last advantages, and metrics of the teacher; a collective."""
        config, groups = self.config, self.trainer.groups
        # Log-probabilities pi' of the policy, and those of reference and teacher, before the first update.
        samples = updater.add_recomputed(samples, clock)
        if isinstance(self.teacher, TeacherServers):
            with clock.part("recompute"):
                samples = add_teacher_logprobs(samples, self.teacher, groups.replica)

        # Advantages that need these log-probabilities or the samples of all ranks. Waits for the slowest rank's
        # rollouts.
        metrics: dict[str, float] = {}
        with clock.part("waiting"):
            samples = refine_advantages(samples, rollouts, config.train, config.reward, group=groups.dp)
            if self.teacher is not None:
                if not config.distillation.is_exact:
                    metrics = compute_teacher_metrics(samples, groups)
                samples = add_distillation_advantages(samples, config.distillation)
        return samples, metrics


def refine_advantages(
    samples: Sequence[TrainingSample],
    groups: Sequence[RolloutGroup],
    train: TrainConfig,
    reward: RewardConfig,
    *,
    group: ProcessGroup | None,
) -> list[TrainingSample]:
    """Apply the KL penalty and the batch normalization to the advantages; a collective of the data-parallel ranks.

    With ``reward.kl_coef`` the reward of token t is ``-kl_coef * KL_t`` (rollout policy against the reference). The
    response's score is added at its last token. Group advantages use the sum over the response. With
    ``train.advantage = "none"`` each token gets its return-to-go (REINFORCE++, arXiv 2501.03262).

    Siblings are side by side in ``samples``. A penalty needs their ``reference_logprobs``, except on pipeline stages
    that compute no loss.
    """
    result = list(samples)
    episodes = episode_indices(samples)
    scored = is_scored(groups).flatten()[episodes].tolist()
    if reward.kl_coef and result:
        penalties = [compute_kl_penalty(sample, reward) for sample in result]
        if train.advantage == "none":
            # Without a group mean the advantages are the rewards, the same at every token of a response.
            values = [sample.advantages - returns_to_go(p) for sample, p in zip(result, penalties, strict=True)]
        else:
            # Siblings are side by side, so a view restores the groups.
            by_sample = torch.stack([penalty.sum() for penalty in penalties])
            sums = by_sample.new_zeros(episodes[-1] + 1).index_add(0, torch.tensor(episodes), by_sample)
            by_episode = compute_group_advantages(groups, train, reward, sums.view(len(groups), -1)).flatten()
            values = list(by_episode[episodes])
        result = [_with_advantages(*each) for each in zip(result, values, scored, strict=True)]
    return _whiten(result, scored, group) if train.advantage_normalization == "batch" else result


def add_distillation_advantages(
    samples: Sequence[TrainingSample], distillation: DistillationConfig
) -> list[TrainingSample]:
    """Add the teacher's part of ``[distillation]`` to the advantages and drop ``teacher_logprobs``.

    With ``divergence = "sampled"`` a token's part is ``coef * (log teacher - log mu)``, clamped to +-20 before the
    product: the gradient of KL(policy || teacher) at each position by itself. No group mean or deviation includes it,
    and samples without a reward get it too. Without ``task_reward`` it is the whole advantage.
    """
    result = []
    for sample in samples:
        values = sample.advantages if distillation.task_reward else torch.zeros_like(sample.advantages)
        if sample.teacher_logprobs is not None:
            values = values - distillation.coef * _teacher_log_ratio(sample)
        result.append(replace(_with_advantages(sample, values, is_scored=True), teacher_logprobs=None))
    return result


def compute_teacher_metrics(samples: Sequence[TrainingSample], groups: ParallelGroups) -> dict[str, float]:
    """Return ``teacher_reverse_kl``, the mean of log mu - log teacher over all ranks' tokens; a collective."""
    with_teacher = [sample for sample in samples if sample.teacher_logprobs is not None]
    total = sum(float(_teacher_log_ratio(sample).sum()) for sample in with_teacher)
    return _token_mean("teacher_reverse_kl", total, with_teacher, groups)


def _token_mean(name: str, total: float, samples: Sequence[TrainingSample], groups: ParallelGroups) -> dict[str, float]:
    """Return the mean of a number over the tokens of all ranks' samples, of which this rank's have ``total``."""
    # Ranks of a replica have the same samples: one of them reports.
    is_first = dist.get_rank(groups.tp) == 0 and dist.get_rank(groups.cp) == 0
    mean = Metric(total, sum(int(sample.loss_mask.sum()) for sample in samples))
    return reduce_metrics([{name: mean}], groups.world, contributes=is_first)


def _teacher_log_ratio(sample: TrainingSample) -> Tensor:
    """Return log mu - log teacher ``[T]``, 0 outside the loss mask."""
    assert sample.teacher_logprobs is not None and sample.rollout_logprobs is not None
    return torch.where(sample.loss_mask, kl_estimate(sample.rollout_logprobs, sample.teacher_logprobs, "k1"), 0.0)


def compute_kl_penalty(sample: TrainingSample, reward: RewardConfig) -> Tensor:
    """Return ``kl_coef * KL_t`` of each token ``[T]``; 0 where the sample has no reference."""
    reference = sample.reference_logprobs
    rollout = sample.rollout_logprobs
    if reference is None or rollout is None:
        return torch.zeros(sample.num_tokens)
    # An estimate from one token must be of the policy that sampled it: the rollout policy, not pi.
    penalty = reward.kl_coef * kl_estimate(rollout, reference, reward.kl_estimator)
    return torch.where(sample.loss_mask, penalty, 0.0)


def compute_kl_metrics(
    samples: Sequence[TrainingSample], reward: RewardConfig, groups: ParallelGroups
) -> dict[str, float]:
    """Return ``kl_in_reward``, the mean KL estimate of all ranks' tokens without ``kl_coef``; a collective."""
    with_reference = [sample for sample in samples if sample.reference_logprobs is not None]
    # The penalty contains the coefficient, the metric does not.
    total = sum(float(compute_kl_penalty(sample, reward).sum()) for sample in with_reference) / reward.kl_coef
    return _token_mean("kl_in_reward", total, with_reference, groups)


def _whiten(
    samples: Sequence[TrainingSample], is_scored: Sequence[bool], group: ProcessGroup | None
) -> list[TrainingSample]:
    """Normalize advantages by the mean and deviation of all ranks' tokens; failed rewards stay at 0 and are ignored."""
    # A failed reward has advantage 0, which would pull the mean and the deviation.
    local = [s.advantages[s.loss_mask] for s, scored in zip(samples, is_scored, strict=True) if scored]
    # The empty tensor lets a rank without scored samples take part in the collective.
    moments = reduce(add, all_gather_objects(Moments.of(torch.cat([torch.empty(0), *local])), group))
    return [
        _with_advantages(sample, moments.whiten(sample.advantages), scored)
        for sample, scored in zip(samples, is_scored, strict=True)
    ]


def _with_advantages(sample: TrainingSample, values: Tensor, is_scored: bool) -> TrainingSample:
    """Return the sample with other advantages, 0 outside the loss mask and on samples without a reward."""
    mask = sample.loss_mask if is_scored else torch.zeros_like(sample.loss_mask)
    return replace(sample, advantages=torch.where(mask, values, 0.0))


def add_teacher_logprobs(
    samples: Sequence[TrainingSample], servers: TeacherServers, group: ProcessGroup | None
) -> list[TrainingSample]:
    """Return the samples with ``teacher_logprobs`` from servers, requested by the group's first rank; a collective."""

    def request() -> tuple[list[Tensor], str]:
        try:
            return servers.logprobs(samples), ""
        except ServerError as error:
            return [], str(error)

    logprobs, problem = broadcast_object(request, group)
    if problem:
        raise ServerError("distillation.teacher_urls", problem)
    return [replace(sample, teacher_logprobs=row) for sample, row in zip(samples, logprobs, strict=True)]
