"""One step's rollouts: sampled ahead or now, refilled where a group carries no signal, cut to the step's size."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megatron_dppo.clock import Clock
from megatron_dppo.evaluation import generate_groups, sample_and_score
from megatron_dppo.parallel.objects import from_leader
from megatron_dppo.prefetch import Batch
from megatron_dppo.session import Session
from megatron_dppo.types import Metric, RolloutGroup, SamplingParams


@dataclass(frozen=True)
class Collected:
    """This data-parallel rank's rollouts of a step."""

    groups: list[RolloutGroup]
    ages: list[int]
    """for each group, rollout steps between its weights and the ones that train on it"""
    num_dropped: int
    """groups that were sampled and scored, and are not trained on"""

    def metrics(self, dp: int) -> dict[str, Metric]:
        """How old the rollouts are, and how many were left out (a sum over the ``dp`` ranks)."""
        return {
            "policy_age": Metric(sum(self.ages), len(self.ages)),
            "policy_age_max": Metric(max(self.ages, default=0), kind="max"),
            "stale_fraction": Metric(sum(age > 0 for age in self.ages), len(self.ages)),
            "oversampled_dropped": Metric(self.num_dropped, 1 / dp),
        }


def collect_rollouts(session: Session, clock: Clock) -> Collected:
    """This rank's scored groups of the step; afterwards the next batches are sampled in the background, if they may be.

    With dynamic sampling, groups whose rewards are all equal are replaced by later prompts of the stream, sampled with
    the current weights, for at most ``max_refills`` rounds. All ranks take part in each round, so that the cursor stays
    one integer for the whole run.
    """
    rollout, layout = session.config.rollout, session.inputs.layout
    share = rollout.prompts_per_step // layout.dp
    batch = session.prefetch.take(session.step)
    if batch is None:
        first = _reserve(session, session.step)
        drawn = [(group, 0) for group in _sample(session, first.positions(session.trainer.dp_rank), 0, clock)]
    else:
        age = session.step - batch.sampled_at
        found = batch.groups
        drawn = [(group, age) for group in from_leader(lambda: found, session.groups.replica)]
    for attempt in range(1, rollout.max_refills + 1 if rollout.dynamic_sampling else 1):
        lacking = _of_all_ranks(max(0, share - sum(has_signal(group) for group, _ in drawn)), session)
        if not any(lacking):
            break
        drawn += [(group, 0) for group in _refill(session, lacking, attempt, clock)]
    _sample_ahead(session)
    chosen = [drawn[i] for i in choose([has_signal(group) for group, _ in drawn], share)]
    return Collected([group for group, _ in chosen], [age for _, age in chosen], len(drawn) - share)


def has_signal(group: RolloutGroup) -> bool:
    """Whether the scored samples of a group have different rewards, and so non-zero advantages."""
    return len({r.reward for r in group.rollouts if not r.reward_failed}) > 1


def choose(signal: Sequence[bool], count: int) -> list[int]:
    """Which groups a step trains on: the first ``count`` with signal, else the last ones without; in order.

    The order is that of the prompts, never of arrival: short answers come first, and would be chosen too often.
    """
    good = [i for i, has in enumerate(signal) if has][:count]
    flat = [i for i, has in enumerate(signal) if not has]
    return sorted(good + flat[len(flat) - (count - len(good)) :])


def oversampled(count: int, factor: float) -> int:
    """``count * factor`` rounded up, but for what is only the error of a product in binary (100 * 1.1)."""
    return math.ceil(round(count * factor, 6))


def _reserve(session: Session, step: int) -> Batch:
    """Take the prompts of a step's batch from the stream."""
    rollout, dp = session.config.rollout, session.inputs.layout.dp
    count = oversampled(rollout.prompts_per_step // dp, rollout.oversample)
    batch = Batch(step=step, sampled_at=session.step, cursor=session.cursor, prompts_per_rank=count)
    session.cursor += count * dp
    return batch


def _refill(session: Session, lacking: Sequence[int], attempt: int, clock: Clock) -> list[RolloutGroup]:
    """New groups from consecutive prompts of the stream: for each rank what it lacks, times the oversampling."""
    counts = [oversampled(count, session.config.rollout.oversample) for count in lacking]
    rank = session.trainer.dp_rank
    first = session.cursor + sum(counts[:rank])
    session.cursor += sum(counts)
    return _sample(session, range(first, first + counts[rank]), attempt, clock) if counts[rank] else []


def _sample(session: Session, positions: range, attempt: int, clock: Clock) -> list[RolloutGroup]:
    prompts = [session.inputs.train_prompts[i] for i in positions]
    params = _params(session, session.step, attempt)
    return generate_groups(session, prompts, session.config.rollout.samples_per_prompt, params, clock)


def _sample_ahead(session: Session) -> None:
    """Start the batches that may be sampled with the current weights. Prompts and seeds are fixed here and now."""
    for step in session.prefetch.missing(session.step, session.config.run.num_steps):
        batch = _reserve(session, step)
        if session.engine is None:
            session.prefetch.start(batch, list)
            continue
        prompts = [session.inputs.train_prompts[i] for i in batch.positions(session.trainer.dp_rank)]
        samples = session.config.rollout.samples_per_prompt
        params = _params(session, step, 0)
        session.prefetch.start(batch, partial(sample_and_score, session, prompts, samples, params, Clock()))


def _params(session: Session, step: int, attempt: int) -> SamplingParams:
    rollout = session.config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        topk_logprobs=session.config.loss.topk if session.config.loss.is_topk else 0,
        routed_experts=session.config.needs_engine_routing,
        seed=sampling_seed(session, f"rollout {attempt}", step),
    )


def _of_all_ranks(value: int, session: Session) -> list[int]:
    if session.inputs.layout.dp == 1:
        return [value]
    values = [0] * session.inputs.layout.dp
    dist.all_gather_object(values, value, group=session.groups.dp)
    return values


def sampling_seed(session: Session, purpose: str, step: int | None = None) -> int:
    """A seed for a step and this data-parallel rank, a function of the configuration alone (so that resume is exact).

    Args:
        session: this rank's view of the run.
        purpose: different draws of one step have different names.
        step: the rollout step; None = the current one.
    """
    step = session.step if step is None else step
    key = f"{session.config.run.seed}/{purpose}/{step}/{session.trainer.dp_rank}"
    return random.Random(key).getrandbits(31)
