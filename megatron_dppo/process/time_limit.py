"""A stop after the last step that fits before the job's time limit.

A signal before the limit comes at a fixed time, and a step may take longer than what is left then. This module measures
the steps instead, so that a run saves in time whatever a step takes.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from megatron_dppo.errors import ConfigError

VARIABLE = "MEGATRON_DPPO_END_TIME"
"""Environment variable with the time at which the run must have ended, in seconds since 1970."""
EXIT_CODE = 6
"""Exit code of a run that has stopped for this reason: it is saved, and the job must be started again."""
_SLOWER = 1.2
"""Time that is kept for the next step, relative to the longest so far."""


class TimeLimit:
    """Measures steps and decides whether another one fits."""

    def __init__(self, end: float | None, clock: Callable[[], float] = time.time) -> None:
        self._end = end
        self._clock = clock
        self._began = clock()
        self._longest = 0.0
        self._has_evaluated = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Return the limit that ``VARIABLE`` sets."""
        text = environ.get(VARIABLE, "")
        if not text:
            return cls(None)
        try:
            end = float(text)
        except ValueError:
            end = math.nan
        if not 0 <= end < math.inf:
            raise ConfigError(f"{VARIABLE} = {text!r}: expected seconds since 1970, as `date +%s` prints them")
        return cls(end)

    @contextmanager
    def step(self, *, evaluates: bool) -> Iterator[None]:
        """Measure a step, with its evaluation and its save."""
        self._began = self._clock()
        yield
        self._longest = max(self._longest, self._clock() - self._began)
        self._has_evaluated |= evaluates

    def leaves_no_step(self, *, save_seconds: float | None, evaluates_next: bool) -> bool:
        """Return True if another step and its save may not fit. What was not measured may take as long as a step."""
        if self._end is None:
            return False
        now = self._clock()
        longest = max(self._longest, now - self._began)
        save = longest if save_seconds is None else save_seconds
        evaluation = longest if evaluates_next and not self._has_evaluated else 0.0
        # This step's save is still to come, and the save after the next one.
        return now + _SLOWER * longest + evaluation + 2 * save > self._end
