"""Times of an agent's tools: from a response with tool calls to the call that brings their results.

The program runs the tools, so its own time between the two is part of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from megatron_dppo_conversations.rules import Message


class _PendingCall(NamedTuple):
    """A tool call whose result has not come yet."""

    tool: str
    order: int
    """``TurnSpan.order`` of its response."""
    start: float


@dataclass(frozen=True)
class ToolSpan:
    """Time of the tools whose results came with one call."""

    order: int
    """``TurnSpan.order`` of the response that called them."""
    tools: tuple[str, ...]
    """Names of the tools, one for each result. They share the time, since nothing tells their parts apart."""
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


class ToolClock:
    """Clock of one episode's tools. Calls and results are matched by their ids."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pending: dict[str, _PendingCall] = {}
        self.spans: list[ToolSpan] = []

    def begin_tools(self, order: int, calls: Sequence[dict[str, Any]]) -> None:
        """Note that a response with tool calls goes to the program."""
        now = time.monotonic()
        for call in calls:
            self._pending[call["id"]] = _PendingCall(call["function"]["name"], order, now)

    def end_tools(self, messages: Sequence[Message], arrival: float) -> None:
        """Note the results that a call brings, those behind its last response; ``arrival`` is in monotonic seconds."""
        new = takewhile(lambda message: message["role"] != "assistant", reversed(messages))
        ids = [message.get("tool_call_id", "") for message in new if message["role"] == "tool"]
        results = [self._pending.pop(call_id) for call_id in reversed(ids) if call_id in self._pending]
        for order in dict.fromkeys(result.order for result in results):
            calls = [result for result in results if result.order == order]
            self.spans.append(ToolSpan(order, tuple(call.tool for call in calls), calls[0].start, arrival))

    def metrics(self) -> dict[str, float]:
        """Return the time in tools, in seconds and as a share of the episode's time so far."""
        seconds = 0.0
        covered = 0.0
        # Tools of parallel conversations run at the same time, which counts once.
        for span in sorted(self.spans, key=lambda span: span.start):
            seconds += max(0.0, span.end - max(span.start, covered))
            covered = max(covered, span.end)
        elapsed = time.monotonic() - self._start
        return {"agent/tool_seconds": seconds, "agent/tool_fraction": seconds / elapsed if elapsed else 0.0}
