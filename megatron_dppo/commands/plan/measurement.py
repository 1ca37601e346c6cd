"""Measured memory, collectives and work of one update of one rank, and its extrapolation to all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.commands.plan.meter import Peak, Work
from megatron_dppo.errors import PlanError

STATIC = ("weights", "gradients", "optimizer")
"""Names of the memory that a rank holds between updates."""


TEACHER = "teacher"
"""Phase that allocates a teacher's output layer and hidden states on the device."""


@dataclass(frozen=True, kw_only=True)
class UpdateMeasurement:
    """Measurement of one update of one rank."""

    static: dict[str, int]
    """Bytes by the names of ``STATIC``, and ``other``."""
    start_peak: Peak
    """Peak while model and optimizer are built."""
    peaks: dict[str, Peak]
    """Peak of each phase of the update, static memory included."""
    micro_batches: int
    collectives: list[tuple[str, str, tuple[int, ...], int, int]]
    """Sorted tuples (phase, name, ranks of the group, calls, input bytes of this rank)."""
    work: dict[str, Work] = field(default_factory=dict)
    """Work by phase."""
    host: int = 0
    """Bytes of an offloaded optimizer in host memory: fp32 copies, moments and gradients."""

    @property
    def offloaded(self) -> int:
        """Number of parameters updated on the host: each has copy, two moments and gradient there in fp32."""
        return self.host // 16

    @property
    def peak(self) -> Peak:
        """Highest peak of the update."""
        return max(self.peaks.values(), key=lambda peak: peak.total)


def scale_optimizer(measured: UpdateMeasurement, factor: float) -> UpdateMeasurement:
    """Return the measurement with the optimizer's static memory scaled by ``factor``."""
    saved = measured.static["optimizer"] - round(factor * measured.static["optimizer"])

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


def extrapolate(measured: Mapping[int, UpdateMeasurement], layers: int) -> UpdateMeasurement:
    """Extrapolate linearly to a rank whose model chunks have ``layers`` layers.

    The peak of each phase is linear in the layers. The maximum over phases is not, so each is extrapolated.

    Args:
        measured: Two measurements by the layers of a chunk.
        layers: Layers of a chunk.

    Raises:
        PlanError: The two measurements have different phases or collectives.

    Example:
        If one layer needs 3 bytes and two need 5, 48 layers need 97.

        >>> _line((1, 3), (2, 5), 48)
        97
    """
    (few, small), (more, large) = sorted(measured.items())

    def line(at_few: Any, at_more: Any) -> Any:
        return _line((few, at_few), (more, at_more), layers)

    calls = [{entry[:3]: entry[3:] for entry in measurement.collectives} for measurement in (small, large)]
    for name, first, second in (
        ("collectives", calls[0], calls[1]),
        ("phases", small.peaks, large.peaks),
        ("work", small.work, large.work),
    ):
        if first.keys() != second.keys():
            difference = sorted(first.keys() ^ second.keys())
            raise PlanError(
                f"Expected the same {name} with {few} and {more} layers, got {difference} in one of them only. Fix: "
                "plan without --search, which rehearses all layers"
            )
    return UpdateMeasurement(
        static={name: line(small.static[name], large.static[name]) for name in small.static},
        start_peak=_extrapolate_peak(line, small.start_peak, large.start_peak),
        peaks={phase: _extrapolate_peak(line, peak, large.peaks[phase]) for phase, peak in small.peaks.items()},
        micro_batches=small.micro_batches,
        collectives=sorted((*key, *map(line, calls[0][key], calls[1][key])) for key in calls[0]),
        work={phase: _extrapolate_work(line, work, large.work[phase]) for phase, work in small.work.items()},
        host=line(small.host, large.host),
    )


def _line(first: tuple[int, Any], second: tuple[int, Any], at: int) -> Any:
    """Return the value at ``at`` of the line through two points. An integer if theirs are."""
    x, y = first
    other_x, other_y = second
    slope = (other_y - y) / (other_x - x)
    value = y + slope * (at - x)
    return round(value) if isinstance(y, int) and isinstance(other_y, int) else value


def _extrapolate_peak(line: Any, small: Peak, large: Peak) -> Peak:
    phases = {**small.by_phase, **large.by_phase}
    by_phase = {name: line(small.by_phase.get(name, 0), large.by_phase.get(name, 0)) for name in phases}
    return Peak(line(small.total, large.total), small.phase, by_phase)


def _extrapolate_work(line: Any, small: Work, large: Work) -> Work:
    dtypes = {**small.flops, **large.flops}
    return Work(
        flops={dtype: line(small.flops.get(dtype, 0), large.flops.get(dtype, 0)) for dtype in dtypes},
        bytes_moved=line(small.bytes_moved, large.bytes_moved),
        seconds=line(small.seconds, large.seconds),
    )
