"""Oversampling that stops the slowest groups, and carries what they have over to later steps.

Each rank takes the groups that it carries first, then new prompts, and goes on until it has as many complete groups as
it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from megatron_dppo.parallel.objects import from_each, from_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.collect import score_completions
from megatron_dppo.rollout.engine import StoppingEngine
from megatron_dppo.run.session import Session
from megatron_dppo.run.stream.carried import Carried
from megatron_dppo.types import RolloutGroup, SamplingParams


def sample_fastest(
    session: Session, lacking: Sequence[int], counts: Sequence[int], params: SamplingParams, clock: Clock
) -> list[RolloutGroup]:
    """At least ``lacking[rank]`` scored groups of this rank, in the order of its prompts. A collective of all ranks.

    Args:
        session: its cursor moves by the new prompts of all ranks, and ``session.carry`` holds what was stopped.
        lacking: complete groups that each data-parallel rank needs.
        counts: groups that each rank has under way at first, the carried ones included.
        params: of the new tokens.
        clock: where the seconds go.
    """
    rank, step, limit = session.trainer.dp_rank, session.step, session.config.rollout.partial_rollouts
    held = session.carry.of_ranks(session.inputs.layout.dp)
    fresh = [max(0, count - len(groups)) for count, groups in zip(counts, held, strict=True)]
    first = session.cursor + sum(fresh[:rank])
    session.cursor += sum(fresh)
    if not lacking[rank]:
        session.carry.groups = from_each(held[rank], session.groups.dp)
        return []
    mine = [*held[rank], *(Carried(i, step) for i in range(first, first + fresh[rank]))]
    keep = {group.position for group in mine if step - group.since < limit}
    found = from_leader(lambda: _sample(session, mine, keep, lacking[rank], params, clock), session.groups.replica)
    left = [group for group, complete in zip(mine, found, strict=True) if complete is None and group.position in keep]
    session.carry.groups = from_each(left, session.groups.dp)
    session.carry.given_up += sum(group is None for group in found) - len(left)
    return [group for group in found if group is not None]


def _sample(
    session: Session, wanted: Sequence[Carried], keep: set[int], enough: int, params: SamplingParams, clock: Clock
) -> list[RolloutGroup | None]:
    prompts = [session.inputs.train_prompts[group.position] for group in wanted]
    keys, siblings = [group.position for group in wanted], session.config.rollout.samples_per_prompt
    engine = cast(StoppingEngine, session.engine)  # the configuration allows it with no other
    with clock.part("rollout"):
        found = engine.generate_first(prompts, keys, siblings, params, enough, keep)
    complete = [(prompt, completions) for prompt, completions in zip(prompts, found, strict=True) if completions]
    with clock.part("reward"):
        scored = iter(
            score_completions(
                session.scorer,
                [prompt for prompt, _ in complete],
                [completion for _, completions in complete for completion in completions],
            )
        )
    return [next(scored) if completions else None for completions in found]
