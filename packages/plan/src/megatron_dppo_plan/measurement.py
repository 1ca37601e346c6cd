"""Measured memory, collectives and work of one update of one rank, and its extrapolation to all layers."""

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

    extrapolated: UpdateMeasurement = _extrapolate([replace(one, collectives=[]) for one in measured], counts)
    collectives = _extrapolate(calls, counts)
    return replace(extrapolated, collectives=sorted((*key, *numbers) for key, numbers in collectives.items()))


def _require_same_keys(name: str, parts: Sequence[Mapping[Any, Any]]) -> None:
    for other in parts[1:]:
        if other.keys() != parts[0].keys():
            difference = sorted(other.keys() ^ parts[0].keys())
            raise PlanError(
                f"Expected the same {name} with one layer more, got {difference} in one of them only. Fix: plan with "
                "--all-layers and without --search"
            )


def _extrapolate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return the first value, and ``counts`` times the difference of each other value to it, number by number.

    A key that is missing in a dictionary has 0, texts and lists are those of the first value. Integers stay integers.
    """
    first = values[0]
    if isinstance(first, str | list):
        return first
    if isinstance(first, tuple):
        return tuple(_extrapolate(each, counts) for each in zip(*values, strict=True))
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _extrapolate([value.get(key, 0) for value in values], counts) for key in keys}
    if isinstance(first, UpdateMeasurement | Peak | Work):
        return type(first)(**_extrapolate([vars(value) for value in values], counts))
    result = first + sum(count * (value - first) for count, value in zip(counts, values[1:], strict=True))
    return round(result) if all(isinstance(value, int) for value in values) else result
