"""The time of an agent: worked cases of calls one after the other, in parallel, rejected and in progress."""

from __future__ import annotations

import pytest

from megatron_dppo_agents import agent_clock
from megatron_dppo_agents.agent_clock import AgentClock

# (time, event): "+a" begins the call a, "-a" ends it with a response, "!a" rejects it. Then a time, and the agent's
# seconds until it.
CASES = {
    "no call": ([], 7, 7),
    "one after the other": ([(1, "+a"), (3, "-a"), (4, "+b"), (9, "-b")], 10, 3),
    "in parallel": ([(1, "+a"), (2, "+b"), (5, "-a"), (7, "-b")], 10, 4),
    "one within the other": ([(1, "+a"), (2, "+b"), (3, "-b"), (7, "-a")], 10, 4),
    "three that overlap": ([(1, "+a"), (2, "-a"), (3, "+b"), (4, "+c"), (5, "-c"), (6, "-b")], 10, 6),
    "rejected": ([(1, "+a"), (5, "!a")], 10, 10),
    "rejected beside another": ([(1, "+a"), (2, "+b"), (3, "!b"), (6, "-a")], 10, 5),
    "in progress": ([(1, "+a"), (3, "-a"), (6, "+b")], 10, 4),
    "in progress since before another ended": ([(1, "+a"), (2, "+b"), (5, "-b")], 10, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_waits_are_counted_once_and_rejected_calls_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(agent_clock.time, "monotonic", lambda: now)
    clock = AgentClock()
    events, end, expected = CASES[case]
    for now, event in events:  # noqa: B007
        if event[0] == "+":
            clock.begin_call(event[1])
        else:
            clock.end_call(event[1], is_answered=event[0] == "-")
    now = end
    assert clock.seconds() == expected
