"""Checks of the servers of a pool while requests are under way: who is silent, who is sick, who is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.member import Member

_FAILED_CHECKS = 3
"""Health checks in a row that a server may fail: one that is only busy answers late, but not three times."""


class Watch:
    """Two checks of each server. ``alive`` is cheap, and a server that only works hard passes it: one failure counts.
    ``health`` goes through the whole engine and may take long.

    Args:
        members: whom.
        seconds: between two checks.
        lose: gives a server up, with the reason.
        version: the weights that a server must have to be used again.
    """

    def __init__(
        self,
        members: Sequence[Member],
        seconds: float,
        lose: Callable[[Member, str], None],
        version: Callable[[], int],
    ) -> None:
        self._members, self._seconds, self._lose, self._version = members, seconds, lose, version
        self.resting = False
        """servers are being given new weights: a paused one is not sick, and none is taken back"""
        self._under_way = 0
        self._checks: list[asyncio.Task[None]] = []
        self._rescue: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """A request begins; checks run from the first one on."""
        self._under_way += 1
        if not self._checks:
            loops = (self._watch_answers, self._watch_health)
            self._checks = [asyncio.create_task(loop(member)) for member in self._members for loop in loops]

    def leave(self) -> None:
        """A request ended; the last one ends the checks."""
        self._under_way -= 1
        if not self._under_way:
            for check in self._checks:
                check.cancel()
            self._checks = []

    async def ask_again(self) -> None:
        """Ask every server at once whether it can be used again; callers at the same time share one round."""
        if self._rescue is None or self._rescue.done():
            self._rescue = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._rescue)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._take_back(member) for member in self._members if member.problem is not None))

    async def _take_back(self, member: Member) -> None:
        """Use a server again, if it works and has the current weights.

        Those of one that the last sync left out are never current, whatever it calls them: a run that was killed may
        have given it a version of this number, which had other weights.
        """
        if member.banned or not member.synced:
            return
        try:
            version = (await member.server.info()).policy_version
        except ServerError:
            return
        if member.banned or member.problem is None:
            return
        if version != self._version():
            member.problem = f"it answers, but its weights are version {version}, expected {self._version()}"
            member.final = True
        # New weights may come while health is asked: then the version that was read says nothing any more.
        elif await member.server.health() and version == self._version() and not member.banned:
            member.problem, member.final, member.failed_checks = None, False, 0

    async def _watch_answers(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if not await member.server.alive():
                self._lose(member, "it does not answer")
            elif member.problem is not None and not self.resting:
                await self._take_back(member)
                if member.problem is None:
                    member.rest_until = 0.0

    async def _watch_health(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if self.resting or member.problem is not None or await member.server.health() or self.resting:
                member.failed_checks = 0
                continue
            member.failed_checks += 1
            if member.failed_checks >= _FAILED_CHECKS:
                self._lose(member, f"it failed {member.failed_checks} health checks in a row")
