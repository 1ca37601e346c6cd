"""What one update of one rank needs, as measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_dppo.plan.meter import Peak, Work

STATIC = ("weights", "gradients", "optimizer")
"""What a rank keeps between updates."""
TEACHER = "teacher"
"""The phase of a teacher's output layer and hidden states on the device."""


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
    host: int = 0
    """bytes in host memory, of the optimizer that is offloaded: fp32 copies, moments and gradients"""

    @property
    def offloaded(self) -> int:
        """Parameters that are updated on the host: each with copy, two moments and gradient there, all in fp32."""
        return self.host // 16

    @property
    def peak(self) -> Peak:
        """Of the update."""
        return max(self.peaks.values(), key=lambda peak: peak.total)


def with_smaller_optimizer(measured: Measured, part: float) -> Measured:
    """The same update with an optimizer that keeps this part of what was measured, from the end of the start on."""
    saved = measured.static["optimizer"] - round(part * measured.static["optimizer"])

    def smaller(peak: Peak) -> Peak:
        by_phase = dict(peak.by_phase)
        if "optimizer" in by_phase:
            by_phase["optimizer"] -= saved
        return replace(peak, total=peak.total - saved, by_phase=by_phase)

    return replace(
        measured,
        static={**measured.static, "optimizer": measured.static["optimizer"] - saved},
        start_peak=smaller(measured.start_peak),
        peaks={phase: smaller(peak) for phase, peak in measured.peaks.items()},
    )
