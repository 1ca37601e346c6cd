"""The engine's and the trainer's turns on the GPUs, and the publishing of weights at the start of the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.parallel.objects import run_on_leader
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.setup.engines import connect_servers
from megatron_dppo.weights.publish import release_all

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.publish import Publisher, ServerPublisher


class Gpus(Protocol):
    """Every call is a collective of all ranks, and returns lines that the user should see."""

    @property
    def probed(self) -> Mapping[str, float]:
        """See ``Publisher``."""

    def for_sampling(self) -> list[str]:
        """Let the engine sample with the current weights from here on. Does nothing if it already does."""

    def for_training(self) -> list[str]:
        """Let the trainer compute from here on: update the policy, save or export it."""

    def after_update(self, *, samples_next: bool) -> list[str]:
        """Give updated weights to the engine, now or at its next turn.

        Args:
            samples_next: Whether the engine samples before the next checkpoint.
        """

    def exclude(self, servers: Mapping[str, str]) -> None:
        """Use servers no more in this run. ``servers`` has the reason by URL."""


class DedicatedGpus:
    """Trainer and engine have GPUs of their own: new weights are published at once."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._has_published = False

    @property
    def probed(self) -> Mapping[str, float]:
        """See ``Gpus``."""
        return self._publisher.probed

    def for_sampling(self) -> list[str]:
        """See ``Gpus``."""
        if self._has_published:
            return []
        self._has_published = True
        return self._publisher.publish()

    def for_training(self) -> list[str]:
        """See ``Gpus``."""
        return []

    def after_update(self, *, samples_next: bool) -> list[str]:
        """See ``Gpus``."""
        return self._publisher.publish()

    def exclude(self, servers: Mapping[str, str]) -> None:
        """See ``Gpus``."""
        self._publisher.exclude(servers)


class SharedGpus:
    """Servers and trainer take turns on the same GPUs.

    Servers keep no weights while they sleep, so that each of their turns begins with a publish. The trainer's weights
    stay on the device while they are gathered and for the probe's forward pass, and leave after it.

    Args:
        trainer: Policy with everything on the device.
        publisher: Publisher to servers that have released their memory.
    """

    def __init__(self, trainer: PolicyTrainer, publisher: ServerPublisher) -> None:
        self._state, self._publisher = trainer.device_state, publisher
        self._sampling = False

    @property
    def probed(self) -> Mapping[str, float]:
        """See ``Gpus``."""
        return self._publisher.probed

    def for_sampling(self) -> list[str]:
        """See ``Gpus``."""
        if self._sampling:
            return []
        self._state.offload(weights=False)
        notes = self._publisher.publish()
        self._state.offload(weights=True)
        self._sampling = True
        return notes

    def for_training(self) -> list[str]:
        """See ``Gpus``."""
        if not self._sampling:
            return []
        notes = self._publisher.release()
        self._state.restore()
        self._sampling = False
        return notes

    def after_update(self, *, samples_next: bool) -> list[str]:
        """See ``Gpus``. A checkpoint needs the trainer's memory, for which servers would have to sleep again."""
        return self.for_sampling() if samples_next else []

    def exclude(self, servers: Mapping[str, str]) -> None:
        """See ``Gpus``."""
        self._publisher.exclude(servers)


def build_gpus(rollout: RolloutConfig, trainer: PolicyTrainer, publisher: Publisher) -> Gpus:
    """Return the GPU sharing that ``rollout.servers.colocated`` selects."""
    from megatron_dppo.weights.publish import ServerPublisher

    if not rollout.servers.colocated:
        return DedicatedGpus(publisher)
    assert isinstance(publisher, ServerPublisher)
    return SharedGpus(trainer, publisher)


def exclude_servers(gpus: Gpus, guard: GuardState) -> list[str]:
    """Exclude the servers that the guard has found since the last call, and return lines for the user."""
    excluded = guard.take_excluded()
    if excluded:
        gpus.exclude(excluded)
    return [f"{url} is not used any more in this run: {problem}" for url, problem in excluded.items()]


def free_gpus(rollout: RolloutConfig, world: dist.ProcessGroup | None) -> list[str]:
    """Let colocated servers release their GPU memory before the policy is built. A collective.

    They hold it after their start, and after a trainer was killed.

    Args:
        rollout: ``[rollout]``.
        world: CPU group of all ranks.

    Returns:
        Messages for the user.
    """
    if not rollout.servers.colocated:
        return []

    async def release() -> list[str]:
        servers = connect_servers(rollout)  # new clients: those of the run belong to other event loops
        try:
            return await release_all(servers, rollout.weight_sync.attempts)
        finally:
            for server in servers:
                await server.close()

    return run_on_leader(lambda: asyncio.run(release()) if dist.get_rank() == 0 else [], world)
