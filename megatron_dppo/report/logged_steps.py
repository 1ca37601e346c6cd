"""Steps that a tracker already shows, so that a resumed run adds each metric of a step once.

Trackers cannot take values back. MLflow and Trackio draw a step twice if it is logged twice, and Weights & Biases drops
the second value. TensorBoard alone purges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from megatron_dppo.files import read_regular_file, write_synced

LOGGED_STEPS = "tracker_steps.json"
"""File with the last step of each metric, by the id of the run in the tracker."""


class LoggedSteps:
    """Last step of each metric that a run in a tracker got from this folder.

    Example:
        >>> from tempfile import mkdtemp
        >>> steps = LoggedSteps(Path(mkdtemp()), "a1")
        >>> steps.add(["loss"], 4)
        >>> steps.last, steps.has("loss", 3), steps.has("loss", 5), steps.has("reward", 3)
        (4, True, False, False)
    """

    def __init__(self, folder: Path, tracker_id: str) -> None:
        self._folder = folder
        self._tracker_id = tracker_id
        self._steps = dict(_read(folder).get(tracker_id, {}))

    @property
    def last(self) -> int:
        """Last step of any metric, -1 if the run has none."""
        return max(self._steps.values(), default=-1)

    def has(self, name: str, step: int) -> bool:
        """Return True if the run has this metric of this step, or of a later one."""
        return step <= self._steps.get(name, -1)

    def add(self, names: Iterable[str], step: int) -> None:
        """Record that the run gets these metrics of a step."""
        self._steps |= dict.fromkeys(names, step)
        write_synced(self._folder / LOGGED_STEPS, json.dumps(_read(self._folder) | {self._tracker_id: self._steps}))


def _read(folder: Path) -> dict[str, dict[str, int]]:
    """Return the steps by id. A damaged file does not stop a run: at worst a resume shows some steps twice."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular_file(folder / LOGGED_STEPS))
        if isinstance(content, dict):
            return {run: _valid_steps(steps) for run, steps in content.items() if isinstance(steps, dict)}
    return {}


def _valid_steps(steps: Mapping[str, object]) -> dict[str, int]:
    return {name: step for name, step in steps.items() if isinstance(step, int)}
