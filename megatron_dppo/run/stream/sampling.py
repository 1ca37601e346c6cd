"""One step's rollouts: sampled ahead or now, refilled where a group carries no signal, cut to the step's size."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_dppo.parallel.objects import from_each, from_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.run.evaluation import generate_groups, sample_and_score
from megatron_dppo.run.session import Session
from megatron_dppo.run.stream.carried import tokens_by_version
from megatron_dppo.run.stream.fastest import sample_fastest
from megatron_dppo.run.stream.prefetch import Batch
from megatron_dppo.types import LeftOut, Metric, RolloutGroup, SamplingParams


@dataclass(frozen=True)
class Collected:
    """This data-parallel rank's rollouts of a step."""

    groups: list[RolloutGroup]
    ages: list[int]
    """for each group, rollout steps between the oldest weights that sampled it and the ones that train on it"""
    left_out: Mapping[LeftOut, int]
    """groups that are not trained on, by reason"""
    token_ages: dict[int, int]
    """tokens by age"""
    num_carried: int = 0
    """groups that were stopped and go on in the next step"""

    def metrics(self, dp: int) -> dict[str, Metric]:
        """How old the rollouts are, and how many were left out (a sum over the ``dp`` ranks)."""
        return {
            "policy_age": Metric(
                sum(age * tokens for age, tokens in self.token_ages.items()), sum(self.token_ages.values())
            ),
            "policy_age_max": Metric(max(self.ages, default=0), kind="max"),
            "stale_fraction": Metric(sum(age > 0 for age in self.ages), len(self.ages)),
            **{f"left_out/{reason}": Metric(self.left_out.get(reason, 0), 1 / dp) for reason in LeftOut},
            "carried_groups": Metric(self.num_carried, 1 / dp),
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
    if rollout.abort_slowest:
        session.carry.begin_step(session.step, session.trainer.policy_version, rollout.partial_rollouts)
        drawn = [(group, 0) for group in _refill(session, [share] * layout.dp, 0, clock)]
    elif batch is None:
        first = _reserve(session, session.step)
        drawn = [(group, 0) for group in _sample(session, first.positions(session.trainer.dp_rank), 0, clock)]
    else:
        age = session.step - batch.sampled_at
        found = batch.groups
        drawn = [(group, age) for group in from_leader(lambda: found, session.groups.replica)]
    for attempt in range(1, rollout.max_refills + 1 if rollout.dynamic_sampling else 1):
        lacking = from_each(max(0, share - sum(has_signal(group) for group, _ in drawn)), session.groups.dp)
        if not any(lacking):
            break
        drawn += [(group, 0) for group in _refill(session, lacking, attempt, clock)]
    _sample_ahead(session)
    signal = [has_signal(group) for group, _ in drawn]
    places = choose(signal, share)
    chosen = [drawn[i] for i in places]
    by_age = [_tokens_by_age(session, group, age) for group, age in chosen]
    return Collected(
        groups=[group for group, _ in chosen],
        ages=[max(tokens, default=0) for tokens in by_age],
        left_out=_left_out(signal, places, session.carry.given_up if rollout.abort_slowest else 0),
        token_ages=dict(sum((Counter(tokens) for tokens in by_age), Counter())),
        num_carried=len(session.carry.groups[session.trainer.dp_rank]) if rollout.abort_slowest else 0,
    )


def _tokens_by_age(session: Session, group: RolloutGroup, age: int) -> dict[int, int]:
    """A group's tokens by age: ``age``, but where its versions are known better."""
    tokens: dict[int, int] = {}
    for version, count in tokens_by_version(group).items():
        known = session.carry.version_steps.get(version) if session.config.rollout.abort_slowest else None
        tokens_age = age if known is None else session.step - known
        tokens[tokens_age] = tokens.get(tokens_age, 0) + count
    return tokens


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


def _left_out(signal: Sequence[bool], chosen: Sequence[int], given_up: int) -> dict[LeftOut, int]:
    others = [has for i, has in enumerate(signal) if i not in set(chosen)]
    surplus = sum(others)
    return {LeftOut.NO_SIGNAL: len(others) - surplus, LeftOut.SURPLUS: surplus, LeftOut.GIVEN_UP: given_up}


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
    if session.config.rollout.abort_slowest:
        return sample_fastest(session, lacking, counts, _params(session, session.step, attempt), clock)
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
