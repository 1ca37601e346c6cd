"""A progress bar and one line a step on rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tqdm import tqdm

_COLUMNS = (
    ("rollout/reward", "reward", "{:.3f}"),
    ("eval/accuracy", "held-out", "{:.3f}"),
    ("train/mask_fraction", "masked", "{:.2%}"),
    ("train/abs_prob_diff", "|pi-mu|", "{:.4f}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("perf/tokens_per_second", "tok/s", "{:,.0f}"),
)


def format_line(step: int, total: int, values: Mapping[str, float | None]) -> str:
    """One line with the main numbers of a step; a value that was not measured is ``-``, one that is not a
    number ``nan``."""
    width = len(str(total))
    cells = [
        f"{label} {'-' if values.get(key) is None else pattern.format(values[key]):<{7}}"
        for key, label, pattern in _COLUMNS
    ]
    return f"step {step:>{width}}/{total}  " + " ".join(cells).rstrip()


class Console:
    """Prints on the rank that shows; silent elsewhere.

    Args:
        enabled: False on all ranks but one, or when the user wants no output.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: tqdm[None] | None = None

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if not self._enabled:
            return
        try:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        except OSError:
            # A terminal or pipe that went away, as with a lost connection, must not end the run before it is saved.
            self._enabled, self._bar = False, None

    def start(self, description: str, total: int, done: int = 0) -> None:
        """Begin a progress bar (only on a terminal)."""
        self.finish()
        if self._enabled and sys.stdout.isatty():
            self._bar = tqdm(total=total, initial=done, desc=description, file=sys.stdout, leave=False)

    def advance(self) -> None:
        """One more unit of the bar."""
        if self._bar is not None:
            self._bar.update()

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """The line of one training step."""
        self.advance()
        self.say(format_line(step, total, values))

    def finish(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
