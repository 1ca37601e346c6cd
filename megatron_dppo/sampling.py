"""One step's rollouts: this rank's share of the prompts, refilled where a group carries no signal."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch.distributed as dist

from megatron_dppo.clock import Clock
from megatron_dppo.evaluation import generate_groups
from megatron_dppo.session import Session
from megatron_dppo.types import RolloutGroup, SamplingParams


def collect_rollouts(session: Session, clock: Clock) -> list[RolloutGroup]:
    """This data-parallel rank's groups of the step, sampled with the current weights and scored.

    With dynamic sampling, groups whose rewards are all equal are replaced by later prompts of the stream, for at most
    ``max_refills`` rounds. All ranks take part in each round, so that the cursor stays one integer for the whole run.
    """
    rollout, layout = session.config.rollout, session.inputs.layout
    share = rollout.prompts_per_step // layout.dp
    groups = _draw(session, [share] * layout.dp, 0, clock)
    if not rollout.dynamic_sampling:
        return groups
    for attempt in range(1, rollout.max_refills + 1):
        kept = [group for group in groups if has_signal(group)]
        missing = _of_all_ranks(share - len(kept), session)
        if not any(missing):
            break
        groups = kept + _draw(session, missing, attempt, clock)
    return groups


def has_signal(group: RolloutGroup) -> bool:
    """Whether the scored samples of a group have different rewards, and so non-zero advantages."""
    return len({r.reward for r in group.rollouts if not r.reward_failed}) > 1


def _draw(session: Session, counts: Sequence[int], attempt: int, clock: Clock) -> list[RolloutGroup]:
    """``counts[rank]`` groups for each data-parallel rank, from consecutive prompts of the stream."""
    rollout, rank = session.config.rollout, session.trainer.dp_rank
    first = session.cursor + sum(counts[:rank])
    session.cursor += sum(counts)
    if not counts[rank]:
        return []
    params = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=sampling_seed(session, f"rollout {attempt}"),
    )
    prompts = [session.inputs.train_prompts[i] for i in range(first, first + counts[rank])]
    return generate_groups(session, prompts, rollout.samples_per_prompt, params, clock)


def _of_all_ranks(value: int, session: Session) -> list[int]:
    group = session.groups.dp
    values = [0] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sampling_seed(session: Session, purpose: str) -> int:
    """A seed for this step and data-parallel rank, a function of the configuration alone (so that resume is exact)."""
    key = f"{session.config.run.seed}/{purpose}/{session.step}/{session.trainer.dp_rank}"
    return random.Random(key).getrandbits(31)
