"""Comparison of a recomputed step with the run's record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SHOWN_METRICS = 20
"""Metrics that are listed without ``--verbose``."""


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """Differences between a run's step and its replay.

    Example:
        >>> metrics = {"loss": (0.5, 0.5)}
        >>> outcome = ReplayOutcome(step=3, tokens=9, largest=0.0, decisions=0, metrics=metrics, same_layout=True)
        >>> outcome.is_exact, outcome.largest_relative
        (True, 0.0)
    """

    step: int
    tokens: int
    """Number of tokens with a loss."""
    largest: float
    """Largest difference of a token's log pi, in nats."""
    decisions: int
    """Number of tokens that are masked in one of the two computations only."""
    metrics: Mapping[str, tuple[float, float]]
    """Values of each metric in the run and in the replay."""
    same_layout: bool
    changed: tuple[str, ...] = ()
    """Overrides of the run's configuration."""

    @property
    def is_exact(self) -> bool:
        """True if the replay is bit-identical to the run."""
        return not self.largest and not self.decisions and all(was == now for was, now in self.metrics.values())

    @property
    def largest_relative(self) -> float:
        """Largest relative difference of a metric."""
        return max((_relative(*values) for values in self.metrics.values()), default=0.0)

    def plain(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "exact": self.is_exact,
            "same_layout": self.same_layout,
            "overrides": list(self.changed),
            "largest_logprob_difference": self.largest,
            "other_decisions": self.decisions,
            "metrics": {name: {"run": was, "replay": now} for name, (was, now) in self.metrics.items()},
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the outcome as text for the terminal.

        ``verbose`` lists all metrics instead of those that differ most.
        """
        width = max((len(name) for name in self.metrics), default=0)
        shown = sorted(self.metrics if verbose else self._most_different())
        lines = [
            f"  {name:<{width}}  {was:>14.8g}  {now:>14.8g}  {'=' if was == now else f'{now - was:+.1e}'}"
            for name, (was, now) in ((name, self.metrics[name]) for name in shown)
        ]
        if len(shown) < len(self.metrics):
            lines.append(
                f"  {len(self.metrics) - len(shown)} more metrics differ less or not at all (--verbose lists them)"
            )
        verdict = "identical to the run, bit for bit"
        if not self.is_exact:
            verdict = (
                f"largest differences: log pi {self.largest:.2g} nats, metrics {self.largest_relative:.2g} of their "
                f"value; {self.decisions} of {self.tokens} tokens have another mask"
            )
            cause = "same layout: another machine, library or thread count" if self.same_layout else "another layout"
            if self.changed:
                cause = f"with {' '.join(self.changed)}"
            verdict += f" ({cause})"
        header = [f"  {'':<{width}}  {'run':>14}  {'replay':>14}"] if shown else []
        return "\n".join([f"step {self.step}, {self.tokens} tokens", *header, *lines, "", verdict])

    def _most_different(self) -> list[str]:
        """Return the metrics that differ, at most ``_SHOWN_METRICS``, the largest relative difference first."""
        differ = [name for name, (was, now) in self.metrics.items() if was != now]
        return sorted(differ, key=lambda name: -_relative(*self.metrics[name]))[:_SHOWN_METRICS]


def _relative(was: float, now: float) -> float:
    # 1e-12: any change of a metric that was 0 shows.
    return abs(was - now) / max(abs(was), 1e-12)
