"""What came out when a step was computed again, next to what the run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """A step, twice.

    Example:
        >>> found = Outcome(step=3, tokens=9, largest=0.0, decisions=0, metrics={"loss": (0.5, 0.5)}, same_layout=True)
        >>> found.is_exact, found.largest_relative
        (True, 0.0)
    """

    step: int
    tokens: int
    """of the loss masks"""
    largest: float
    """difference of a token's log pi, in nats"""
    decisions: int
    """tokens that one of the two masks and the other does not"""
    metrics: Mapping[str, tuple[float, float]]
    """by name, of the run and now"""
    same_layout: bool
    """computed on as many processes, split in the same way"""
    changed: tuple[str, ...] = ()
    """overrides of the run's configuration"""

    @property
    def is_exact(self) -> bool:
        """Bit for bit the same."""
        return not self.largest and not self.decisions and all(was == now for was, now in self.metrics.values())

    @property
    def largest_relative(self) -> float:
        """Difference of a metric, in parts of it."""
        return max((abs(was - now) / max(abs(was), 1e-12) for was, now in self.metrics.values()), default=0.0)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
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

    def text(self) -> str:
        """For a terminal."""
        width = max((len(name) for name in self.metrics), default=0)
        lines = [
            f"  {name:<{width}}  {was:>14.8g}  {now:>14.8g}  {'=' if was == now else f'{now - was:+.1e}'}"
            for name, (was, now) in sorted(self.metrics.items())
        ]
        verdict = "bit for bit what the run computed"
        if not self.is_exact:
            verdict = (
                f"log pi differs by {self.largest:.2g} at most, {self.decisions} of {self.tokens} tokens are masked "
                f"otherwise, a metric differs by {self.largest_relative:.2g} of its size at most"
            )
            why = "the same layout: another machine, library or thread count" if self.same_layout else "another layout"
            why = f"with {' '.join(self.changed)}" if self.changed else why
            verdict += f" ({why})"
        head = f"  {'':<{width}}  {'run':>14}  {'replay':>14}"
        return "\n".join([f"step {self.step}, {self.tokens} tokens", head, *lines, "", verdict])
