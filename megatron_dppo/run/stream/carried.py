"""Groups that were stopped before they were complete, and how old the tokens are that they bring along.

Positions in the stream are known on all ranks and are part of a checkpoint; tokens are only in the engine of the rank
that sampled them, so that after a resume the carried prompts are sampled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_dppo.types import RolloutGroup, VersionSpan


class Carried(NamedTuple):
    """A group that is not complete yet."""

    position: int
    """of its prompt in the stream"""
    since: int
    """the rollout step that it was first sampled in"""


@dataclass
class Carry:
    """What one step leaves to the next."""

    groups: list[list[Carried]] = field(default_factory=list)
    """of each data-parallel rank, the oldest first"""
    version_steps: dict[int, int] = field(default_factory=dict)
    """the last rollout step that began with each policy version, as far as carried tokens may have it"""

    given_up: int = 0
    """groups of this rank that were stopped in this step for good"""

    def of_ranks(self, dp: int) -> list[list[Carried]]:
        """The groups of each of ``dp`` ranks."""
        return self.groups or [[] for _ in range(dp)]

    def begin_step(self, step: int, policy_version: int, limit: int) -> None:
        """Note whose weights these are; forget what is more than ``limit`` steps old."""
        self.given_up = 0
        self.version_steps[policy_version] = step
        self.version_steps = {v: s for v, s in self.version_steps.items() if s >= step - limit}

    def restore(self, saved: Sequence[Sequence[Sequence[int]]], dp: int) -> int:
        """Take ``groups`` of a checkpoint, for ``dp`` ranks, however many there were; returns how many there are."""
        self.groups = [[Carried(*group) for group in of_rank] for of_rank in saved]
        flat = sorted(group for of_rank in self.groups for group in of_rank)
        if not flat:
            self.groups = []  # as in a run that was never interrupted
        elif len(self.groups) != dp:
            self.groups = [flat[rank::dp] for rank in range(dp)]
        return len(flat)


def tokens_by_version(group: RolloutGroup) -> dict[int, int]:
    """How many of a group's tokens the weights of each version sampled."""
    tokens: dict[int, int] = {}
    for rollout in group.rollouts:
        completion = rollout.completion
        whole = (VersionSpan(completion.policy_version, 0, len(completion.token_ids)),)
        for version, start, end in completion.policy_versions or whole:
            tokens[version] = tokens.get(version, 0) + end - start
    return tokens
