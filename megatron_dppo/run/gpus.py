"""The engine's and the trainer's turns on the GPUs, and the publishing of weights at the start of the engine's."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.parallel.objects import run_on_leader
from megatron_dppo.setup.engines import connect_servers
from megatron_dppo.weights.publish import release_all

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.publish import Publisher, ServerPublisher


class Gpus(ABC):
    """Turns on the GPUs. Every call is a collective of all ranks, and returns lines that the user should see."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    @property
    def probed(self) -> Mapping[str, float]:
        """See ``Publisher``."""
        return self._publisher.probed

    @abstractmethod
    def for_sampling(self) -> list[str]:
        """Let the engine sample with the current weights from here on. Does nothing if it already does."""

    @abstractmethod
    def for_training(self) -> list[str]:
        """Let the trainer compute from here on: update the policy, save or export it."""

    @abstractmethod
    def after_update(self, *, samples_next: bool) -> list[str]:
        """Give updated weights to the engine: now, or at its next turn if it samples only after the next checkpoint."""

    def exclude(self, servers: Mapping[str, str]) -> None:
        """Use servers no more in this run. ``servers`` has the reason by URL."""
        self._publisher.exclude(servers)


class DedicatedGpus(Gpus):
    """Trainer and engine have GPUs of their own: new weights are published at once."""

    _has_published = False

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


class SharedGpus(Gpus):
    """Servers and trainer take turns on the same GPUs.

    Servers keep no weights while they sleep, so that each of their turns begins with a publish. The trainer's weights
    stay on the device while they are gathered and for the probe's forward pass, and leave after it. At first everything
    of the trainer is on the device, and the servers have released their memory.
    """

    def __init__(self, trainer: PolicyTrainer, publisher: ServerPublisher) -> None:
        super().__init__(publisher)
        self._servers = publisher
        self._state = trainer.device_state
        self._sampling = False

    def for_sampling(self) -> list[str]:
        """See ``Gpus``."""
        if self._sampling:
            return []
        self._state.offload(weights=False)
        notes = self._servers.publish()
        self._state.offload(weights=True)
        self._sampling = True
        return notes

    def for_training(self) -> list[str]:
        """See ``Gpus``."""
        if not self._sampling:
            return []
        notes = self._servers.release()
        self._state.restore()
        self._sampling = False
        return notes

    def after_update(self, *, samples_next: bool) -> list[str]:
        """See ``Gpus``. A checkpoint needs the trainer's memory, for which servers would have to sleep again."""
        return self.for_sampling() if samples_next else []


def build_gpus(rollout: RolloutConfig, trainer: PolicyTrainer, publisher: Publisher) -> Gpus:
    """Return the GPU sharing that ``rollout.servers.colocated`` selects."""
    from megatron_dppo.weights.publish import ServerPublisher

    if not rollout.servers.colocated:
        return DedicatedGpus(publisher)
    assert isinstance(publisher, ServerPublisher)
    return SharedGpus(trainer, publisher)


def free_gpus(rollout: RolloutConfig, world: dist.ProcessGroup | None) -> list[str]:
    """Let colocated servers release their memory before the policy is built; return messages. A collective."""
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
