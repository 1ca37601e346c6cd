"""What an update needs of a run: of a session, or of whoever computes a step again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megatron_dppo.config.schema import Config

if TYPE_CHECKING:
    from megatron_dppo.mcore.teacher import Teacher
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.rollout.teacher import TeacherServers


class Updating(Protocol):
    """One rank's view of it."""

    config: Config
    trainer: PolicyTrainer
    groups: ParallelGroups
    step: int
    """rollout steps done"""
    skipped_in_a_row: int
    teacher: Teacher | TeacherServers | None
