"""Console output on rank 0: one line per step, and on a terminal a live view below the lines."""

import sys
from collections.abc import Mapping

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_dppo.report.printable import printable

_COLUMNS = (
    ("rollout/reward", "reward", "{:.3f}"),
    ("eval/accuracy", "held-out", "{:.3f}"),
    ("train/mask_fraction", "masked", "{:.2%}"),
    ("train/abs_prob_diff", "|pi-mu|", "{:.4f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("perf/tokens_per_second", "tok/s", "{:,.0f}"),
)
_MAX_ERROR = 160
"""Characters of an error in the line of a step."""
_ROUNDING = 1e-6
_UNTRAINED = "rollout/agent/untrained/"
"""Shares of an episode's sampled tokens that no update sees, by reason."""
_IDLE = ("perf/waiting_seconds", "perf/prefetch_wait_seconds")
"""Seconds in which the trainer waited, for rollouts or for the slowest rank."""


def format_step_line(step: int, total: int, values: Mapping[str, float | None], agent_error: str = "") -> str:
    """Return one line with the main numbers of a step; ``-`` for a value that was not measured."""
    width = len(str(total))
    cells = [
        f"{label} {'-' if values.get(key) is None else pattern.format(values[key]):<{7}}"
        for key, label, pattern in _COLUMNS
    ]
    agents_failed = values.get("rollout/agent/failed_fraction") or 0.0
    # The rewards of failed episodes count as failed, too.
    rewards_failed = (values.get("rollout/reward_failed_fraction") or 0.0) - agents_failed
    note = f"  rewards failed {rewards_failed:.0%}" if rewards_failed > _ROUNDING else ""
    greedy = values.get("rollout/greedy_reward")
    if greedy is not None:
        note = f"  greedy {greedy:.3f}{note}"
    untrained = values.get("rollout/agent/untrained_fraction") or 0.0
    if untrained > _ROUNDING:
        names = ("left_out", "shorter", "interrupted", "after_stop", "not_repeated")
        reasons = {name: values.get(f"{_UNTRAINED}{name}") or 0.0 for name in names}
        shares = ", ".join(f"{name} {share:.0%}" for name, share in reasons.items() if share > _ROUNDING)
        note += f"  agents untrained {untrained:.0%}: {shares}"
    if agents_failed:
        note += f"  agents failed {agents_failed:.0%}: {_one_line(agent_error)}"
    return f"step {step:>{width}}/{total}  " + " ".join(cells).rstrip() + note


def _one_line(text: str) -> str:
    """Return an error in one line, shortened."""
    return " ".join(text.split())[:_MAX_ERROR]


def idle_fraction(values: Mapping[str, float]) -> float | None:
    """Return the fraction of a step in which the trainer waited. None if it was not measured.

    Example:
        >>> idle_fraction({"perf/step_seconds": 8.0, "perf/waiting_seconds": 2.0})
        0.25
    """
    seconds = values.get("perf/step_seconds")
    return sum(values.get(key, 0.0) for key in _IDLE) / seconds if seconds else None


def live_rows(values: Mapping[str, float], eval_score_name: str) -> list[tuple[str, str]]:
    """Return the rows of the live view, as pairs of name and value."""
    rows: list[tuple[str, float | None, str]] = [
        ("reward", values.get("rollout/reward"), "{:.3f}"),
        (f"held-out {eval_score_name}", values.get("eval/accuracy"), "{:.3f}"),
        ("groups without signal", values.get("rollout/groups_without_signal"), "{:.0%}"),
        ("tokens masked", values.get("train/mask_fraction"), "{:.2%}"),
        ("trainer idle", idle_fraction(values), "{:.0%}"),
        ("tokens per second", values.get("perf/tokens_per_second"), "{:,.0f}"),
    ]
    return [(name, "-" if value is None else pattern.format(value)) for name, value, pattern in rows]


class Console:
    """Output of one rank; disabled on the others."""

    def __init__(self, enabled: bool, eval_score_name: str = "accuracy") -> None:
        self._enabled = enabled
        self._eval_score_name = eval_score_name
        self._live: Live | None = None
        self._progress: Progress | None = None
        self.values: dict[str, float] = {}

    def print(self, text: str) -> None:
        """Print a line above the live view."""
        if not self._enabled:
            return
        text = printable(text)
        try:
            if self._live is None:
                print(text, file=sys.stdout, flush=True)
            else:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            # A lost terminal or closed pipe must not end the run before it is saved.
            self._enabled = False
            self._live = None
            self._progress = None

    def start(self, description: str, total: int, done: int = 0) -> None:
        """Show a progress bar with the live view of steps (only on a terminal)."""
        self.finish()
        if not (self._enabled and sys.stdout.isatty()):
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        window = 3600.0  # Steps take minutes, and the estimate needs several of them.
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), speed_estimate_period=window)
        self._progress.add_task(description, total=total, completed=done)
        self._live = Live(self._view(), console=Terminal(file=sys.stdout), transient=True, refresh_per_second=2)
        self._live.start()

    def _view(self) -> Group:
        assert self._progress is not None
        table = Table.grid(padding=(0, 2))
        for name, value in live_rows(self.values, self._eval_score_name) if self.values else ():
            table.add_row(name, value)
        return Group(table, self._progress)

    def advance(self) -> None:
        """Advance the progress bar by one."""
        if self._live is not None and self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def step(self, step: int, total: int, values: Mapping[str, float], agent_error: str = "") -> None:
        """Print the line of one training step and update the live view."""
        self.advance()
        self.show(values)
        self.print(format_step_line(step, total, values, agent_error))

    def show(self, values: Mapping[str, float]) -> None:
        """Update the numbers of the live view; those of an evaluation stay until the next one."""
        evaluation = {key: value for key, value in self.values.items() if key.startswith("eval/")}
        self.values = evaluation | dict(values)
        if self._live is not None:
            self._live.update(self._view())

    def finish(self) -> None:
        """Remove the live view."""
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._enabled = False
        self._live = None
        self._progress = None
