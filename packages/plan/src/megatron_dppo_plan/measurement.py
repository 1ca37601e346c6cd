"""Measured memory, collectives and work of one update of one rank, and its extrapolation to all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.errors import PlanError
from megatron_dppo_plan.meter import Peak, Work

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


def extrapolate(base: UpdateMeasurement, additions: Sequence[tuple[UpdateMeasurement, int]]) -> UpdateMeasurement:
    """Extrapolate linearly to a rank whose model chunks have more layers.

    The peak of each phase is linear in the layers of each kind. The maximum over phases is not, so each is
    extrapolated. ``additions`` has for each kind of layer the measurement with one more of it in each chunk, and the
    number of layers beyond those of ``base``.

    Example:
        If two layers need 5 bytes and three need 7, 48 layers need 97.

        >>> _extrapolate([5, 7], [46])
        97
    """
    counts = [count for _, count in additions]
    measured = [base, *(each for each, _ in additions)]
    calls = [{entry[:3]: entry[3:] for entry in one.collectives} for one in measured]
    for name, parts in (
        ("collectives", calls),
        ("phases", [one.peaks for one in measured]),
        ("work", [one.work for one in measured]),
    ):
        _require_same_keys(name, parts)

    def line(values: Sequence[Any]) -> Any:
        return _extrapolate(values, counts)

    return UpdateMeasurement(
        static={name: line([one.static[name] for one in measured]) for name in base.static},
        start_peak=_extrapolate_peak(line, [one.start_peak for one in measured]),
        peaks={phase: _extrapolate_peak(line, [one.peaks[phase] for one in measured]) for phase in base.peaks},
        micro_batches=base.micro_batches,
        collectives=sorted(
            (*key, *(line([each[key][column] for each in calls]) for column in range(2))) for key in calls[0]
        ),
        work={phase: _extrapolate_work(line, [one.work[phase] for one in measured]) for phase in base.work},
        host=line([one.host for one in measured]),
    )


def _require_same_keys(name: str, parts: Sequence[Mapping[Any, Any]]) -> None:
    for other in parts[1:]:
        if other.keys() != parts[0].keys():
            difference = sorted(other.keys() ^ parts[0].keys())
            raise PlanError(
                f"Expected the same {name} with one layer more, got {difference} in one of them only. Fix: plan with "
                "--all-layers and without --search"
            )


def _extrapolate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return the first value, and ``counts`` times the difference of each other value to it. Integers stay integers."""
    first = values[0]
    result = first + sum(count * (value - first) for count, value in zip(counts, values[1:], strict=True))
    return round(result) if all(isinstance(value, int) for value in values) else result


def _extrapolate_peak(line: Any, peaks: Sequence[Peak]) -> Peak:
    phases = {name for peak in peaks for name in peak.by_phase}
    by_phase = {name: line([peak.by_phase.get(name, 0) for peak in peaks]) for name in sorted(phases)}
    return Peak(line([peak.total for peak in peaks]), peaks[0].phase, by_phase)


def _extrapolate_work(line: Any, works: Sequence[Work]) -> Work:
    dtypes = {dtype for work in works for dtype in work.flops}
    return Work(
        flops={dtype: line([work.flops.get(dtype, 0) for work in works]) for dtype in sorted(dtypes)},
        bytes_moved=line([work.bytes_moved for work in works]),
        seconds=line([work.seconds for work in works]),
    )
