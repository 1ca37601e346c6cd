"""What one update of one rank needs, as measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dppo.plan.meter import Peak, Work

STATIC = ("weights", "gradients", "optimizer")
"""What a rank keeps between updates."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One update of one rank."""

    static: dict[str, int]
    """bytes by ``STATIC``, and ``other``"""
    start_peak: Peak
    """while model and optimizer are built"""
    peaks: dict[str, Peak]
    """of each part of the update, what is static included"""
    micro_batches: int
    collectives: list[tuple[str, str, tuple[int, ...], int, int]]
    """(phase, name, ranks of the group, calls, bytes that this rank gives), sorted"""
    work: dict[str, Work] = field(default_factory=dict)
    """by phase"""

    @property
    def peak(self) -> Peak:
        """Of the update."""
        return max(self.peaks.values(), key=lambda peak: peak.total)
