"""What a pool knows of one server: whether it is used, why not, and what it broke."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megatron_dppo.rollout.server import Generation, InferenceServer

_FIRST_REST = 0.5
_LONGEST_REST = 10.0
_LONGEST_WISH = 30.0
"""Seconds of a Retry-After that are granted."""
BREACHES = 2
"""Broken contracts after which a server is out until the next sync. The first may be an accident on the way."""


@dataclass(eq=False)
class Member:
    """A server and what is known of it. Times are those of the event loop."""

    server: InferenceServer
    place: int
    """in the order of preference among equally loaded ones"""
    problem: str | None = "no weights were published to it yet"
    """why it is not used; None = it is"""
    synced: bool = False
    """whether the last sync brought it to the current version"""
    final: bool = False
    """whether only the next sync can change that"""
    trouble: str = ""
    """the last failure of a request"""
    failures: int = 0
    """failed bursts of requests since the last good answer"""
    rest_until: float = 0.0
    """it gets no work before, unless there is nobody else"""
    breaches: list[str] = field(default_factory=list)
    """broken contracts since the last sync"""
    failed_checks: int = 0
    losses: int = 0
    """times that it was given up: an answer to a request from before such a time is not used"""
    running: set[asyncio.Task[Generation]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its name."""
        return self.server.url

    def welcome(self, problem: str | None) -> None:
        """Begin anew after a sync; ``problem`` as the field."""
        self.problem, self.final, self.synced = problem, problem is not None, problem is None
        self.trouble, self.failures, self.rest_until, self.failed_checks = "", 0, 0.0, 0
        self.breaches.clear()

    def rest(self, now: float, trouble: str, wish: float | None = None) -> None:
        """Give it no work for a while, longer each time it fails again.

        Args:
            now: the time.
            trouble: why.
            wish: seconds that the server itself asked for.
        """
        self.trouble = trouble
        if now < self.rest_until:  # one burst of requests fails as one
            return
        seconds = min(_FIRST_REST * 2.0**self.failures, _LONGEST_REST)
        self.failures = min(self.failures + 1, 32)
        self.rest_until = now + (seconds if wish is None else max(seconds, min(wish, _LONGEST_WISH)))

    def lose(self, problem: str, *, final: bool = False) -> bool:
        """Give it up, with all that it works on; whether it was in use until now."""
        self.final = self.final or final
        if self.problem is not None:
            return False
        self.problem = problem
        self.losses += 1
        for task in self.running:
            task.cancel()
        return True

    @property
    def banned(self) -> bool:
        """Whether it broke the contract too often to be used before the next sync."""
        return len(self.breaches) >= BREACHES

    def state(self) -> str:
        """Why it is not used now, for a message."""
        return f"{self.url}: {self.problem or self.trouble or 'it works'}"
