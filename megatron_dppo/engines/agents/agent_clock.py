"""The time of an agent: its episode without the time in which it waited for responses."""

from __future__ import annotations

import time


class AgentClock:
    """Clock that stands still while the policy responds. The processing of a rejected call is the agent's time.

    Calls are told apart by any hashable object.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._call_starts: dict[object, float] = {}
        """Start of each call in progress."""
        self._waits: list[tuple[float, float]] = []
        """Disjoint intervals in which the agent waited for responses."""

    def begin_call(self, call: object) -> None:
        """Note that a call begins."""
        self._call_starts[call] = time.monotonic()

    def end_call(self, call: object, *, is_answered: bool) -> None:
        """Note that a call has ended; calls in parallel wait once."""
        start = self._call_starts.pop(call)
        if not is_answered:
            return
        while self._waits and self._waits[-1][1] >= start:
            start = min(start, self._waits.pop()[0])
        self._waits.append((start, time.monotonic()))

    def seconds(self) -> float:
        """Return the time so far."""
        now = time.monotonic()
        waited = sum(end - start for start, end in self._waits)
        if self._call_starts:
            # Calls in progress wait since the first of them began, where no earlier call has waited already.
            start = min(self._call_starts.values())
            last_end = self._waits[-1][1] if self._waits else start
            waited += now - max(start, last_end)
        return now - self._start - waited
