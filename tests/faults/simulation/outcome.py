"""Outcome of a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.faults.simulation.faults import Fault, Plan


@dataclass
class Outcome:
    """Outcome of a schedule."""

    plan: Plan
    end: str = ""
    """``done``, or the error that stopped the run"""
    violations: list[str] = field(default_factory=list)
    guard_only: list[str] = field(default_factory=list)
    """what was wrong with tokens that nothing but the guard before the update stopped"""
    unseen: list[str] = field(default_factory=list)
    """what trained and was wrong in a way that ``invariants.unseen`` explains"""
    happened: list[Fault] = field(default_factory=list)
    lives: int = 1
    seconds: float = 0.0
    rounds: int = 0
    cpu_seconds: float = 0.0
    tokens: int = 0
    """that trained, and were looked at"""

    @property
    def failed(self) -> bool:
        return bool(self.violations)
