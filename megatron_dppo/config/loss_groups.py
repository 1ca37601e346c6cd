"""Base classes with keys that several losses share."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo.config.loss import Aggregation, Form, LossConfig
from megatron_dppo.config.user_functions import FunctionNeeds


class DivergenceThresholds(LossConfig):
    """Keys of a trust region by divergence, with one limit per direction."""

    divergence_threshold_low: float | None = Field(None, gt=0)
    """Trust-region limit for negative advantages. null uses 0.15."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Trust-region limit for positive advantages. null uses 0.15."""

    @property
    def default_threshold(self) -> float:
        """Limit in both directions if none is set."""
        return 0.15

    @property
    def is_total_variation(self) -> bool:
        """True if the limits apply to a total variation, which is at most 1."""
        return True

    @property
    def thresholds(self) -> tuple[float, float]:
        """Limits ``(low, high)`` with the defaults of the loss filled in."""
        low, high = self.divergence_threshold_low, self.divergence_threshold_high
        default = self.default_threshold
        return (default if low is None else low, default if high is None else high)

    def check(self) -> None:
        """Check that the limits of a total variation are at most 1."""
        for key in ("divergence_threshold_low", "divergence_threshold_high"):
            value = getattr(self, key)
            if value is not None and self.is_total_variation and value > 1:
                raise ValueError(
                    f"{key} = {value}: a total variation is at most 1; set it to at most 1 (the paper uses 0.15 to 0.2)"
                )
        super().check()

    def resolved_defaults(self) -> dict[str, object]:
        """Add the limits."""
        low, high = self.thresholds
        limits = {"divergence_threshold_low": low, "divergence_threshold_high": high}
        return limits | super().resolved_defaults()


class RatioClipping(LossConfig):
    """Keys of a trust region by the ratio r = pi / mu, with one limit per direction."""

    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """Mask tokens with a negative advantage and r < 1 - this. null uses 0.2."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Mask tokens with a positive advantage and r > 1 + this. null uses 0.28."""

    default_clip_ratios: ClassVar[tuple[float, float]] = (0.2, 0.28)
    """Limits ``(low, high)`` of the loss if none are set."""

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """Limits ``(low, high)`` with the defaults of the loss filled in."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        default_low, default_high = self.default_clip_ratios
        return (default_low if low is None else low, default_high if high is None else high)

    def resolved_defaults(self) -> dict[str, object]:
        """Add the limits."""
        low, high = self.clip_ratios
        return {"clip_ratio_low": low, "clip_ratio_high": high} | super().resolved_defaults()


class RatioCap(LossConfig):
    """Key of a cap on the importance weight."""

    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Cap C of the weight min(r, C). null and ``off`` disable it."""

    default_cap: ClassVar[float] = float("inf")
    """Cap of the loss if none is set."""

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """``(floor, cap)`` of the weight; 0 and infinity if there is none."""
        if self.ratio_cap == "off":
            return (0.0, float("inf"))
        return (0.0, self.default_cap if self.ratio_cap is None else self.ratio_cap)

    def resolved_defaults(self) -> dict[str, object]:
        """Add the cap."""
        return {"ratio_cap": self.ratio_limits[1]} | super().resolved_defaults()


class SequenceMean(LossConfig):
    """A loss of whole sequences that is defined with ``seq_mean_token_mean``."""

    forms: ClassVar[tuple[Form, ...]] = ("ratio",)
    default_aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"

    @property
    def needs(self) -> FunctionNeeds:
        """Whole sequences."""
        return FunctionNeeds(sequences=True, zero_advantage=False)

    def check(self) -> None:
        """Check that the aggregation is the one that defines the loss."""
        if self.resolved_aggregation != self.default_aggregation:
            raise ValueError(
                f"Expected aggregation = {self.default_aggregation!r}, which defines {self.name}, got "
                f"{self.aggregation!r}. Fix: remove the key."
            )
        super().check()
