"""Our own code with one mechanism taken out, to show that the invariants bite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from megatron_dppo.rollout import scheduler
from megatron_dppo.rollout.pending import PromptSlot
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.types import VersionSpan
from megatron_dppo.weights.proof import SyncProof
from megatron_dppo.weights.publish import ServerPublisher
from megatron_dppo_engines.servers import contract, pool
from megatron_dppo_engines.servers.pooled_server import PooledServer
from megatron_dppo_engines.servers.updates import ServerUpdates
from megatron_dppo_engines.sglang import client
from tests.faults.simulation.faults import WEIGHTS, Fault, Plan
from tests.faults.simulation.seams import NOW


@dataclass(frozen=True)
class Mutation:
    """One mechanism taken out."""

    applied: Callable[[], AbstractContextManager[Any]]
    fits: Callable[[Plan], bool]
    """which schedules may show it"""


def _kinds(plan: Plan) -> set[str]:
    return {fault.kind.split(":")[0] for fault in plan.faults}


def _without_contract() -> AbstractContextManager[Any]:
    return mock.patch.object(contract, "check_generation", lambda *_: None)


def _without_spans() -> AbstractContextManager[Any]:
    """Every token is taken for one of the current weights."""
    decode = client.decode_generation

    def decode_as_current(*args: Any) -> Any:
        generation = decode(*args)
        span = (VersionSpan(NOW.trainer.policy_version, 0, len(generation.token_ids)),)
        return replace(generation, versions=span if len(generation.token_ids) else ())

    return mock.patch.object(client, "decode_generation", decode_as_current)


def _without_proof() -> AbstractContextManager[Any]:
    async def verify(*_: Any) -> None:
        pass

    return mock.patch.object(SyncProof, "verify", verify)


def _twice() -> AbstractContextManager[Any]:
    """Append the result of a stopped request two times."""
    append = GrowingResponse.append_sampled

    def append_twice(self: GrowingResponse, generation: Any) -> None:
        append(self, generation)
        if generation.finish_reason == "abort":
            append(self, generation)

    return mock.patch.object(GrowingResponse, "append_sampled", append_twice)


def _of_places(change: Callable[[list[PromptSlot]], list[PromptSlot]]) -> AbstractContextManager[Any]:
    """Change the messages of ranks about stopped groups."""

    def all_gather_objects(value: Any, group: Any) -> list[Any]:
        return [change(value) if isinstance(value, list) and value and isinstance(value[0], PromptSlot) else value]

    return mock.patch.object(scheduler, "all_gather_objects", all_gather_objects)


def _loses_carried() -> AbstractContextManager[Any]:
    return _of_places(lambda places: places[1:])


def _doubles_carried() -> AbstractContextManager[Any]:
    return _of_places(lambda places: [*places, *places[:1]])


def _resume_forgets() -> AbstractContextManager[Any]:
    restore = RolloutScheduler.restore

    def forget(self: RolloutScheduler, saved: Any, contents: Any) -> None:
        restore(self, replace(saved, waiting=[[] for _ in saved.waiting]), contents)

    return mock.patch.object(RolloutScheduler, "restore", forget)


def _ahead_is_forgotten() -> AbstractContextManager[Any]:
    """Leave the requests in flight out of a checkpoint."""
    saved = RolloutScheduler.state

    def without(self: RolloutScheduler) -> Any:
        whole = saved(self)
        return replace(whole, submissions=[[] for _ in whole.submissions])

    return mock.patch.object(RolloutScheduler, "state", without)


def _never_paused() -> AbstractContextManager[Any]:
    """Servers sample across a change of the weights."""

    async def pause(self: Any) -> None:
        self._gate.hold()

    return mock.patch.object(pool.ServerPool, "pause", pause)


def _keep_memory() -> AbstractContextManager[Any]:
    """Servers on the trainer's GPUs are not asked for their memory."""
    return mock.patch.object(ServerPublisher, "release", lambda self: [])


def _without_cache() -> AbstractContextManager[Any]:
    """The memory of the weights is taken again, and not that of the cache."""

    async def wake(self: Any) -> None:
        pass

    return mock.patch.object(ServerUpdates, "_wake_cache", wake)  # reaches: one half of a call


@contextmanager
def _takes_names() -> Iterator[None]:
    """A server that a sync left out is taken back when its weights have the right name."""
    mark_synced = PooledServer.mark_synced

    def mark_all_synced(self: PooledServer, problem: str | None) -> None:
        mark_synced(self, problem)
        self.is_synced = True

    with mock.patch.object(PooledServer, "mark_synced", mark_all_synced):
        yield


@contextmanager
def _never_lets_go() -> Iterator[None]:
    """A slot of the pool is never given back."""

    class Slots:
        def __init__(self, count: int) -> None:
            self.left, self.loop = count, NOW.loop

        async def __aenter__(self) -> None:
            self.left -= 1
            if self.left < 0:
                await self.loop.create_future()

        async def __aexit__(self, *_: object) -> None:
            pass

    with mock.patch.object(pool.asyncio, "Semaphore", Slots):
        yield


OLD_WEIGHTS_AGAIN = Plan(
    seed=3177,
    servers=2,
    steps=2,
    new_tokens=3,
    routing=True,
    method="disk",
    stopping=True,
    partial=1,
    oversample=2.0,
    health_seconds=2.0,
    token_seconds=0.3,
    latency=0.002,
    train_seconds=0.5,
    faults=(
        Fault("crash", 1, 4.59, 0.5, 0),
        Fault("partition", 0, 5.633, 43.569, 0),
        Fault("partition", 0, 2.606, 0.486, 0),
    ),
)
"""A server restarts with the weights of its start, faster than a health check sees it, and is the only one left."""

MUTATIONS = {
    "the contract is not checked": Mutation(_without_contract, lambda p: "lie" in _kinds(p)),
    "versions of tokens are ignored": Mutation(_without_spans, lambda p: p == OLD_WEIGHTS_AGAIN),
    "checksums are not compared": Mutation(
        _without_proof, lambda p: p.probe_every > 1 and bool(set(WEIGHTS) & _kinds(p))
    ),
    "a stopped part is appended twice": Mutation(_twice, lambda p: p.partial > 0 and p.steps > 1),
    "a carried group is lost": Mutation(_loses_carried, lambda p: p.partial > 0 and p.steps > 1),
    "a carried group is kept twice": Mutation(_doubles_carried, lambda p: p.partial > 0 and p.steps > 1),
    "a resume forgets the carried groups": Mutation(
        _resume_forgets, lambda p: p.partial > 0 and "kill_trainer" in _kinds(p) and p.steps > 2
    ),
    "a checkpoint forgets what is under way": Mutation(
        _ahead_is_forgotten, lambda p: p.staleness > 0 and "kill_trainer" in _kinds(p) and p.steps > 2
    ),
    "servers sample across a sync": Mutation(_never_paused, lambda p: p.staleness > 0 and p.routing and p.steps > 1),
    "a server is taken back by the name of its weights": Mutation(_takes_names, lambda p: False),
    "servers keep their memory in training": Mutation(_keep_memory, lambda p: p.colocated),
    "the cache is not taken again": Mutation(_without_cache, lambda p: p.colocated),
    "a slot is never given back": Mutation(_never_lets_go, lambda p: p.max_in_flight == 2),
}
