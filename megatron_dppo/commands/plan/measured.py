"""Memory of one update of one rank, as measured, and extrapolated to all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.commands.plan.meter import Peak, Work
from megatron_dppo.errors import PlanError

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


def extrapolate(measured: Mapping[int, Measured], layers: int) -> Measured:
    """The ``Measured`` of a rank whose chunks have ``layers`` layers.

    The peak of each part of an update is linear by itself; which of them is the highest may change with the layers.

    Args:
        measured: by layers of a chunk, two of them.
        layers: of a chunk.

    Raises:
        PlanError: the two do not consist of the same parts.

    Example:
        One layer takes 3 bytes and two take 5, so 48 take 97.

        >>> _line((1, 3), (2, 5), 48)
        97
    """
    (few, small), (more, large) = sorted(measured.items())

    def line(at_few: Any, at_more: Any) -> Any:
        return _line((few, at_few), (more, at_more), layers)

    calls = [{found[:3]: found[3:] for found in one.collectives} for one in (small, large)]
    for name, one, other in (
        ("collectives", calls[0], calls[1]),
        ("parts", small.peaks, large.peaks),
        ("work", small.work, large.work),
    ):
        if one.keys() != other.keys():
            raise PlanError(f"{few} and {more} layers differ in their {name}: {sorted(one.keys() ^ other.keys())}")
    return Measured(
        static={name: line(small.static[name], large.static[name]) for name in small.static},
        start_peak=_peak(line, small.start_peak, large.start_peak),
        peaks={phase: _peak(line, peak, large.peaks[phase]) for phase, peak in small.peaks.items()},
        micro_batches=small.micro_batches,
        collectives=sorted((*key, *map(line, calls[0][key], calls[1][key])) for key in calls[0]),
        work={phase: _work(line, work, large.work[phase]) for phase, work in small.work.items()},
        host=line(small.host, large.host),
    )


def _line(first: tuple[int, Any], second: tuple[int, Any], at: int) -> Any:
    """The value at ``at`` of the line through two points; a whole number if theirs are."""
    (x, y), (other_x, other_y) = first, second
    slope = (other_y - y) / (other_x - x)
    value = y + slope * (at - x)
    return round(value) if isinstance(y, int) and isinstance(other_y, int) else value


def _peak(line: Any, small: Peak, large: Peak) -> Peak:
    phases = {**small.by_phase, **large.by_phase}
    by_phase = {name: line(small.by_phase.get(name, 0), large.by_phase.get(name, 0)) for name in phases}
    return Peak(line(small.total, large.total), small.phase, by_phase)


def _work(line: Any, small: Work, large: Work) -> Work:
    dtypes = {**small.flops, **large.flops}
    return Work(
        flops={dtype: line(small.flops.get(dtype, 0), large.flops.get(dtype, 0)) for dtype in dtypes},
        read_and_written=line(small.read_and_written, large.read_and_written),
        seconds=line(small.seconds, large.seconds),
    )
