"""Data of agents for the report: shares of a run's episodes and tokens, failures by error, and turns of an episode."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_METRICS = {
    "rollout/agent/failed_fraction": "episodes failed",
    "rollout/finish/length": "episodes cut off",
    "rollout/agent/untrained_fraction": "sampled tokens untrained",
    "rollout/agent/untrained/left_out": "... left out by the program",
    "rollout/agent/untrained/shorter": "... of shorter segments",
    "rollout/agent/untrained/interrupted": "... of calls at the end",
    "rollout/agent/untrained/after_stop": "... behind a stop string",
    "rollout/agent/untrained/not_repeated": "... not repeated when run again",
    "rollout/agent/calls": "calls answered, an episode",
    "rollout/agent/repeated_calls": "calls retried, an episode",
    "rollout/agent/rejected_calls": "calls rejected, an episode",
    "rollout/agent/malformed_calls": "malformed tool calls, an episode",
    "rollout/agent/segments": "segments, an episode",
    "rollout/agent/tool_seconds": "seconds in tools, an episode",
    "rollout/agent/tool_fraction": "share of the time in tools",
    "rollout/agent/tool_fraction_max": "... of the episode with the largest",
}
_MAX_FAILURES = 12
_MAX_ERROR = 300
"""Characters of an error."""


class FailureCounts:
    """Failed episodes of the recorded steps, by the first line of their error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the failures of a step's rows."""
        for row in rows:
            error = (row.get("failure") or "").strip().partition("\n")[0][:_MAX_ERROR]
            if error:
                self._counts[error] += 1
                self._first.setdefault(error, f"step {step}, sample {row['sample']}")

    def view(self) -> list[list[object]]:
        """Return count, error and first occurrence of the most frequent errors."""
        return [[count, error, self._first[error]] for error, count in self._counts.most_common(_MAX_FAILURES)]


def agent_view(records: Sequence[Mapping[str, Any]], failures: FailureCounts) -> dict[str, Any] | None:
    """Return the first, last and mean value of each metric of agents, and the failures; None without an agent."""
    if not any("rollout/agent/calls" in record for record in records):
        return None
    metrics = []
    for name, title in _METRICS.items():
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            metrics.append([title, values[0], values[-1], sum(values) / len(values)])
    return {"metrics": metrics, "failures": failures.view()}


def turns(given: NDArray[np.bool_], segment_lengths: Sequence[int], start: int, stop: int) -> list[list[int]]:
    """Return ``[first token, 1 if sampled, index of the segment]`` of each turn; none of a plain response.

    ``given`` [R] marks tokens that were not sampled. Those from ``start`` to before ``stop`` are shown, and counted.
    """
    if not segment_lengths and not given.any():
        return []
    segment = np.repeat(np.arange(max(1, len(segment_lengths))), segment_lengths or [len(given)])
    is_new = np.ones(len(given), dtype=np.bool_)
    is_new[1:] = (given[1:] != given[:-1]) | (segment[1:] != segment[:-1])
    is_new[start] = True
    firsts = [int(i) for i in np.flatnonzero(is_new) if start <= i < stop]
    return [[i - start, int(not given[i]), int(segment[i])] for i in firsts]


def tool_times(times: Sequence[Mapping[str, Any]], start: int, stop: int) -> list[list[object]]:
    """Return ``[index of the response's last token, seconds, names]`` of the tools that shown responses called.

    ``times`` are ``Completion.tool_times``. Indices count from ``start``, the first token that is shown.
    """
    return [
        [each["position"] - start, round(each["seconds"], 3), _tool_names(each["tools"])]
        for each in times
        if start <= each["position"] < stop
    ]


def _tool_names(tools: Sequence[str]) -> str:
    """Return the names, with the number of calls where a tool was called several times."""
    counts = Counter(tools)
    return ", ".join(name if number == 1 else f"{name} ({number} calls)" for name, number in counts.items())
