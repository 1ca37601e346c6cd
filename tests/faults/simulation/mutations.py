"""Our own code with one mechanism taken out, to show that the invariants bite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from megatron_dppo.rollout import pool
from megatron_dppo.rollout.member import Member
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.sglang import client
from megatron_dppo.run.stream import fastest
from megatron_dppo.run.stream.carried import Carry
from megatron_dppo.types import VersionSpan
from megatron_dppo.weights.proof import SyncProof
from tests.faults.simulation.faults import WEIGHTS, Plan
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
    return mock.patch.object(pool, "check_generation", lambda *_: None)


def _without_spans() -> AbstractContextManager[Any]:
    """Every token is taken for one of the current weights."""
    decode = client.decode_generation

    def decode_as_current(*args: Any) -> Any:
        generation = decode(*args)
        span = (VersionSpan(NOW.trainer.policy_version, 0, len(generation.token_ids)),)
        return replace(generation, versions=span if generation.token_ids else ())

    return mock.patch.object(client, "decode_generation", decode_as_current)


def _without_proof() -> AbstractContextManager[Any]:
    async def judge(*_: Any) -> None:
        pass

    return mock.patch.object(SyncProof, "judge", judge)


def _twice() -> AbstractContextManager[Any]:
    """What a stopped request returned is appended two times."""
    append = GrowingResponse.append_sampled

    def append_twice(self: GrowingResponse, generation: Any) -> None:
        append(self, generation)
        if generation.finish_reason == "abort":
            append(self, generation)

    return mock.patch.object(GrowingResponse, "append_sampled", append_twice)


def _loses_carried() -> AbstractContextManager[Any]:
    return mock.patch.object(fastest, "from_each", lambda value, group: [value[1:]])


def _doubles_carried() -> AbstractContextManager[Any]:
    return mock.patch.object(fastest, "from_each", lambda value, group: [[*value, *value[:1]]])


def _resume_forgets() -> AbstractContextManager[Any]:
    return mock.patch.object(Carry, "restore", lambda *_: 0)


@contextmanager
def _takes_names() -> Iterator[None]:
    """A server that a sync left out is taken back when its weights have the right name."""
    welcome = Member.welcome

    def welcome_all(self: Member, problem: str | None) -> None:
        welcome(self, problem)
        self.synced = True

    with mock.patch.object(Member, "welcome", welcome_all):
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


MUTATIONS = {
    "the contract is not checked": Mutation(_without_contract, lambda p: "lie" in _kinds(p)),
    "versions of tokens are ignored": Mutation(_without_spans, lambda p: bool({"crash", "label"} & _kinds(p))),
    "checksums are not compared": Mutation(
        _without_proof, lambda p: p.probe_every > 1 and bool(set(WEIGHTS) & _kinds(p))
    ),
    "a stopped part is appended twice": Mutation(_twice, lambda p: p.partial > 0 and p.steps > 1),
    "a carried group is lost": Mutation(_loses_carried, lambda p: p.partial > 0 and p.steps > 1),
    "a carried group is kept twice": Mutation(_doubles_carried, lambda p: p.partial > 0 and p.steps > 1),
    "a resume forgets the carried groups": Mutation(
        _resume_forgets, lambda p: p.partial > 0 and "kill_trainer" in _kinds(p) and p.steps > 2
    ),
    "a server is taken back by the name of its weights": Mutation(_takes_names, lambda p: False),
    "a slot is never given back": Mutation(_never_lets_go, lambda p: p.max_in_flight == 2),
}
