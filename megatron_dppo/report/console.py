"""On a terminal a live view of the run below its lines; elsewhere one line a step. On rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_COLUMNS = (
    ("rollout/reward", "reward", "{:.3f}"),
    ("eval/accuracy", "held-out", "{:.3f}"),
    ("train/mask_fraction", "masked", "{:.2%}"),
    ("train/abs_prob_diff", "|pi-mu|", "{:.4f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("perf/tokens_per_second", "tok/s", "{:,.0f}"),
)
_IDLE = ("perf/waiting_seconds", "perf/prefetch_wait_seconds")
"""seconds in which the trainer had nothing to do: it waited for rollouts, or for the slowest rank"""


def format_line(step: int, total: int, values: Mapping[str, float | None]) -> str:
    """One line with the main numbers of a step; a value that was not measured is ``-``, one that is not a
    number ``nan``."""
    width = len(str(total))
    cells = [
        f"{label} {'-' if values.get(key) is None else pattern.format(values[key]):<{7}}"
        for key, label, pattern in _COLUMNS
    ]
    return f"step {step:>{width}}/{total}  " + " ".join(cells).rstrip()


def idle_share(values: Mapping[str, float]) -> float | None:
    """The share of a step in which the trainer waited; None where it was not measured.

    Example:
        >>> idle_share({"perf/step_seconds": 8.0, "perf/waiting_seconds": 2.0})
        0.25
    """
    seconds = values.get("perf/step_seconds")
    return sum(values.get(key, 0.0) for key in _IDLE) / seconds if seconds else None


def live_rows(values: Mapping[str, float], eval_score_name: str) -> list[tuple[str, str]]:
    """What the live view shows of the newest step, name and value.

    Args:
        values: of the step, and of the newest evaluation.
        eval_score_name: ``accuracy`` where held-out answers are right or wrong, else ``score``.
    """
    found: list[tuple[str, float | None, str]] = [
        ("reward", values.get("rollout/reward"), "{:.3f}"),
        (f"held-out {eval_score_name}", values.get("eval/accuracy"), "{:.3f}"),
        ("groups without signal", values.get("rollout/groups_without_signal"), "{:.0%}"),
        ("tokens masked", values.get("train/mask_fraction"), "{:.2%}"),
        ("trainer idle", idle_share(values), "{:.0%}"),
        ("tokens a second", values.get("perf/tokens_per_second"), "{:,.0f}"),
    ]
    return [(name, "-" if value is None else pattern.format(value)) for name, value, pattern in found]


class Console:
    """Prints on the rank that shows; silent elsewhere.

    Args:
        enabled: False on all ranks but one, or when the user wants no output.
        eval_score_name: what the mean over held-out answers is called, ``accuracy`` or ``score``.
    """

    def __init__(self, enabled: bool, eval_score_name: str = "accuracy") -> None:
        self._enabled = enabled
        self._eval_score_name = eval_score_name
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._values: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        if not self._enabled:
            return
        try:
            if self._live is None:
                print(text, file=sys.stdout, flush=True)
            else:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            # A terminal or pipe that went away, as with a lost connection, must not end the run before it is saved.
            self._enabled, self._live, self._progress = False, None, None

    def start(self, description: str, total: int, done: int = 0) -> None:
        """Begin a progress bar, under which the live view of steps stands (only on a terminal)."""
        self.finish()
        if not (self._enabled and sys.stdout.isatty()):
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        window = 3600.0  # steps take minutes, and the estimate needs several
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), speed_estimate_period=window)
        self._progress.add_task(description, total=total, completed=done)
        self._live = Live(self._view(), console=Terminal(file=sys.stdout), transient=True, refresh_per_second=2)
        self._live.start()

    def _view(self) -> Group:
        assert self._progress is not None
        table = Table.grid(padding=(0, 2))
        for name, value in live_rows(self._values, self._eval_score_name) if self._values else ():
            table.add_row(name, value)
        return Group(table, self._progress)

    def advance(self) -> None:
        """One more unit of the bar."""
        if self._live is not None and self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """The line of one training step, and its numbers in the live view."""
        self.advance()
        self.show(values)
        self.say(format_line(step, total, values))

    def show(self, values: Mapping[str, float]) -> None:
        """Numbers for the live view; those of an evaluation stay until the next one."""
        kept = {key: value for key, value in self._values.items() if key.startswith("eval/")}
        self._values = kept | dict(values)
        if self._live is not None:
            self._live.update(self._view())

    def finish(self) -> None:
        """Remove the live view."""
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._enabled = False
        self._live, self._progress = None, None
