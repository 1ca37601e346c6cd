"""Groups of keys that several losses have; a loss takes them by deriving from them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron_dppo.config.loss import LossConfig


class DivergenceThresholds(LossConfig):
    """A trust region by divergence, with a limit for each direction."""

    divergence_threshold_low: float | None = Field(None, gt=0)
    """Trust region for negative advantages (``ipo``: for pi < mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Trust region for positive advantages (``ipo``: for pi > mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""

    @property
    def default_threshold(self) -> float:
        """Threshold on both sides where none is set."""
        return 0.15

    @property
    def is_total_variation(self) -> bool:
        """Whether the thresholds are of a total variation, which is at most 1."""
        return True

    @property
    def thresholds(self) -> tuple[float, float]:
        """Divergence thresholds (low, high) with the defaults of the loss filled in."""
        low, high = self.divergence_threshold_low, self.divergence_threshold_high
        default = self.default_threshold
        return (default if low is None else low, default if high is None else high)

    def check(self) -> None:
        """Check that a total variation is limited to at most 1.

        Raises:
            ValueError: it is not.
        """
        for key in ("divergence_threshold_low", "divergence_threshold_high"):
            value = getattr(self, key)
            if value is not None and self.is_total_variation and value > 1:
                raise ValueError(f"{key} = {value}: a total variation never exceeds 1; the paper uses 0.15 to 0.2")
        super().check()

    def resolved_defaults(self) -> dict[str, Any]:
        """Add the thresholds."""
        low, high = self.thresholds
        own = {"divergence_threshold_low": low, "divergence_threshold_high": high}
        return own | super().resolved_defaults()


class RatioClipping(LossConfig):
    """A trust region by the ratio, with a limit for each direction."""

    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """Tokens with negative advantage and r < 1 - low are dropped; None = 0.2, but 3e-4 for ``gspo``."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Tokens with positive advantage and r > 1 + high are dropped; None = 0.28, but 4e-4 for ``gspo``."""

    default_clip_ratios: ClassVar[tuple[float, float]] = (0.2, 0.28)

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """(low, high) of the ratio clip with the defaults of the loss filled in."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        default_low, default_high = self.default_clip_ratios
        return (default_low if low is None else low, default_high if high is None else high)

    def resolved_defaults(self) -> dict[str, Any]:
        """Add the limits."""
        low, high = self.clip_ratios
        return {"clip_ratio_low": low, "clip_ratio_high": high} | super().resolved_defaults()


class RatioCap(LossConfig):
    """A cap of the weight."""

    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """C in min(r, C) (``drpo``: of the whole weight); ``off`` = no cap; None = 5 for ``dppo_*`` and ``cispo``, 2 for
    ``score_centering``, else no cap."""

    default_cap: ClassVar[float] = float("inf")

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """(floor, cap) of the weight; 0 and infinity where there is none."""
        if self.ratio_cap == "off":
            return (0.0, float("inf"))
        return (0.0, self.default_cap if self.ratio_cap is None else self.ratio_cap)

    def resolved_defaults(self) -> dict[str, Any]:
        """Add the cap."""
        return {"ratio_cap": self.ratio_limits[1]} | super().resolved_defaults()
