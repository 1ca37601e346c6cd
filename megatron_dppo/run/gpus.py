"""Whose turn it is on the GPUs: the trainer's, or that of the servers which share them with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from megatron_dppo.config.schema import Config
from megatron_dppo.parallel.objects import agreed
from megatron_dppo.run.engines import connect_servers
from megatron_dppo.weights.memory import release_all

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.publish import Publisher, ServerPublisher


class Gpus(Protocol):
    """Both calls are collectives of all ranks, and return what the user should know."""

    def for_sampling(self) -> list[str]:
        """The engine samples from here on, with the current weights."""

    def for_training(self) -> list[str]:
        """The trainer computes from here on: updates the policy, saves or exports it."""


class OwnGpus:
    """Trainer and engine have each what they need."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def for_sampling(self) -> list[str]:
        """See ``Gpus``."""
        return self._publisher.publish()

    def for_training(self) -> list[str]:
        """See ``Gpus``."""
        return []


class SharedGpus:
    """They take turns. Servers keep nothing of the weights while they sleep, so that each turn of theirs begins with a
    publish; the trainer's weights stay for its gathering and the probe's forward pass, and leave after it.

    Args:
        trainer: with everything on the device.
        publisher: of servers that have released their memory.
    """

    def __init__(self, trainer: PolicyTrainer, publisher: ServerPublisher) -> None:
        self._state, self._publisher = trainer.device_state, publisher
        self._sampling = False

    def for_sampling(self) -> list[str]:
        """See ``Gpus``; in a turn of the servers' it does nothing."""
        if self._sampling:
            return []
        self._state.leave(weights=False)
        notes = self._publisher.publish()
        self._state.leave(weights=True)
        self._sampling = True
        return notes

    def for_training(self) -> list[str]:
        """See ``Gpus``."""
        if not self._sampling:
            return []
        notes = self._publisher.release()
        self._state.come_back()
        self._sampling = False
        return notes


def gpus_of(config: Config, trainer: PolicyTrainer, publisher: Publisher) -> Gpus:
    """By ``rollout.servers.colocated``."""
    from megatron_dppo.weights.publish import ServerPublisher

    if not config.rollout.servers.colocated:
        return OwnGpus(publisher)
    assert isinstance(publisher, ServerPublisher)
    return SharedGpus(trainer, publisher)


def free_gpus(config: Config, world: dist.ProcessGroup | None) -> list[str]:
    """Have colocated servers release the memory that the policy is built in: they have just started, or were left so
    by a trainer that was killed. A collective; returns what the user should know.

    Args:
        config: of the run.
        world: all ranks.
    """
    if not config.rollout.servers.colocated:
        return []

    async def release() -> list[str]:
        servers = connect_servers(config)  # others than the run's, which belong to other event loops
        try:
            return await release_all(servers, config.rollout.weight_sync.attempts)
        finally:
            for server in servers:
                await server.close()

    return agreed(lambda: asyncio.run(release()) if dist.get_rank() == 0 else [], world)
