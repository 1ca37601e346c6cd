"""The time of an agent: its episode without the time in which it waited for responses."""

import time


class AgentClock:
    """Clock that stands still while the policy responds. The processing of a rejected call is the agent's time."""

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
        if is_answered:
            self._waits = self._waits_with(start, time.monotonic())

    def seconds(self) -> float:
        """Return the time so far. A call in progress counts as a wait."""
        now = time.monotonic()
        waits = self._waits_with(min(self._call_starts.values()), now) if self._call_starts else self._waits
        return now - self._start - sum(end - start for start, end in waits)

    def _waits_with(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the waits joined with one more, which ends last."""
        waits = list(self._waits)
        while waits and waits[-1][1] >= start:
            start = min(start, waits.pop()[0])
        return [*waits, (start, end)]
