"""The ``[loss]`` section: the policy losses, their options, and the names that other frameworks give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_dppo.config.loss_aliases import LOSS_ALIASES
from megatron_dppo.config.section import Section

LossName = Literal[
    "dppo_binary_tv",
    "dppo_binary_kl",
    "dppo_topk_tv",
    "dppo_topk_kl",
    "dppo_recompute_binary_tv",
    "dppo_recompute_binary_kl",
    "drpo",
    "ipo",
    "grpo",
    "minirl",
    "pg_is",
    "cispo",
    "score_centering",
    "gspo",
    "ppo_clip",
    "ppo_decoupled",
]
Aggregation = Literal[
    "token_mean", "token_sum", "token_sum_norm", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
Form = Literal["reinforce", "ratio"]
Mismatch = Literal["none", "truncate", "mask_token", "mask_sequence", "mask_geometric"]


class LossConfig(Section):
    """The policy loss. Source of names and defaults: arXiv 2602.04879 and docs/loss.md.

    ``name`` may be an alias (``verl/dppo_kl``); docs/loss.md lists them.

    Example:
        >>> sorted(LossConfig(name="dppo_topk_tv", topk=8).required_inputs)
        ['rollout_logprobs', 'rollout_topk_logprobs', 'topk_logprobs', 'topk_valid']
        >>> config = LossConfig(name="verl/dppo_kl")
        >>> config.name, config.divergence_threshold_high, config.ratio_cap
        ('dppo_binary_kl', 0.2, 3.0)
    """

    name: LossName = "dppo_binary_tv"
    divergence_threshold_low: float | None = Field(None, gt=0)
    """Trust region for negative advantages (``ipo``: for pi < mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Trust region for positive advantages (``ipo``: for pi > mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""
    ratio_cap: float | None = Field(None, gt=0)
    """C in min(r, C) (``drpo``: of the whole weight); None = no cap, but 5 for ``cispo`` and 2 for
    ``score_centering``."""
    ratio_floor: float | None = Field(None, gt=0)
    """Only ``cispo``: r is raised to this value (the two-sided form); None = no floor."""
    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """Ratio losses: tokens with negative advantage and r < 1 - low are dropped; None = 0.2, but 3e-4 for ``gspo``."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Ratio losses: tokens with positive advantage and r > 1 + high are dropped; None = 0.28, but 4e-4 for ``gspo``."""
    dual_clip: float | None = Field(None, gt=1)
    """Only ``ppo_*``: tokens with negative advantage and r above this are dropped; None = no such limit."""
    topk: int = Field(20, ge=1)
    """Only ``dppo_topk_*`` and ``score_centering``: K, the rollout's most probable tokens per position."""
    topk_eviction: bool = False
    """Only ``dppo_topk_*``: a sampled token outside the Top-K replaces the K-th instead of joining the set."""
    direction: Literal["sampled", "predictive"] = "sampled"
    """Only ``dppo_topk_*``: what tells whether an update leads outward: the sampled token's log pi - log mu, or the
    derivative of the divergence along the update."""
    tail: Literal["proportional", "aggregated", "uniform"] = "proportional"
    """Only with ``direction = "predictive"``: the sum of pi^2 outside the Top-K set, exact or estimated."""
    centering: Literal["none", "truncate", "mask"] = "truncate"
    """Only ``score_centering``: the weight, 1, min(r, ``ratio_cap``), or r inside [``mismatch_low``, ``mismatch_high``]
    and 0 outside."""
    form: Form | None = None
    """Reported value, ``-A min(r, C) log pi`` or ``-A min(r, C)`` (no gradient above C, nor below ``ratio_floor``);
    None = reinforce where there is a choice. ``ppo_*`` and ``gspo`` are always ``ratio``, ``drpo`` and
    ``score_centering`` never."""
    mismatch: Mismatch = "none"
    """Weights against the mismatch of trainer and engine: truncate them, or drop the tokens or sequences outside."""
    mismatch_low: float | None = Field(None, ge=0)
    """Lower limit; None = 0.5 for the masks, 0 for ``truncate``."""
    mismatch_high: float | None = Field(None, gt=0)
    """Upper limit; None = 2."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty, added for every token of the loss mask."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || anchor) from one token: log ratio, half its square, or r - 1 - log r."""
    kl_anchor: Literal["reference", "rollout"] = "reference"
    """What the penalty pulls towards."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation | None = None
    """How tokens become one number; None = token_mean, but seq_mean_token_mean for ``gspo``."""
    horizon: int | None = Field(None, ge=1)
    """Tokens that the ``*_norm`` aggregations divide by, usually the longest response allowed."""

    @property
    def is_dppo(self) -> bool:
        """Whether the loss is one of the DPPO variants."""
        return self.name.startswith("dppo_")

    @property
    def is_topk(self) -> bool:
        """Whether the loss needs the rollout's Top-K."""
        return self.name.startswith("dppo_topk_") or self.centers_score

    @property
    def centers_score(self) -> bool:
        """Whether the sampler's expected score is subtracted."""
        return self.name == "score_centering"

    @property
    def uses_anchor(self) -> bool:
        """Whether the loss compares with log-probabilities that the trainer recomputed at the rollout's weights."""
        return self.name.startswith("dppo_recompute_") or self.name in ("minirl", "ppo_decoupled")

    @property
    def is_surrogate(self) -> bool:
        """Whether a clipped token reports its clipped value (PPO's surrogate) instead of 0."""
        return self.name in ("ppo_clip", "ppo_decoupled", "gspo")

    @property
    def thresholds(self) -> tuple[float, float]:
        """Divergence thresholds (low, high) with the defaults of the variant filled in."""
        default = 0.3 if self.name == "ipo" else 0.05 if self.name.endswith("_kl") else 0.15
        low, high = self.divergence_threshold_low, self.divergence_threshold_high
        return (default if low is None else low, default if high is None else high)

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """(low, high) of the ratio clip with the defaults of the loss filled in."""
        defaults = (3e-4, 4e-4) if self.name == "gspo" else (0.2, 0.28)
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return (defaults[0] if low is None else low, defaults[1] if high is None else high)

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """(floor, cap) of the weight; 0 and infinity where there is none. Only ``drpo`` has negative weights."""
        cap = {"cispo": 5.0, "score_centering": 2.0}.get(self.name) if self.ratio_cap is None else self.ratio_cap
        if self.centers_score and self.centering != "truncate":
            cap = None
        floor = float("-inf") if self.name == "drpo" else self.ratio_floor or 0.0
        return (floor, float("inf") if cap is None else cap)

    @property
    def mismatch_limits(self) -> tuple[float, float]:
        """(low, high) of the mismatch weights with the defaults filled in."""
        low = (0.0 if self.mismatch == "truncate" else 0.5) if self.mismatch_low is None else self.mismatch_low
        return (low, 2.0 if self.mismatch_high is None else self.mismatch_high)

    @property
    def resolved_form(self) -> Form:
        """``form`` with the default of the loss filled in."""
        return self.form or ("ratio" if self.is_surrogate else "reinforce")

    @property
    def resolved_aggregation(self) -> Aggregation:
        """``aggregation`` with the default of the loss filled in."""
        return self.aggregation or ("seq_mean_token_mean" if self.name == "gspo" else "token_mean")

    @property
    def required_inputs(self) -> frozenset[str]:
        """Fields of LossInputs that this loss needs and that other losses may do without."""
        return frozenset(self._reasons())

    def reason(self, name: str) -> str:
        """The setting because of which the loss needs the input ``name``."""
        return self._reasons()[name]

    def _reasons(self) -> dict[str, str]:
        why = {"rollout_logprobs": "loss.name"}
        if self.is_topk:
            why |= dict.fromkeys(("topk_logprobs", "rollout_topk_logprobs", "topk_valid"), "loss.name")
        if self.direction == "predictive" and self.tail != "aggregated":
            why["topk_other_square" if self.tail == "proportional" else "vocab_size"] = "loss.tail"
        if self.uses_anchor:
            why["anchor_logprobs"] = "loss.name"
        if self.name == "gspo":
            why["sequence_ids"] = "loss.name"
        if self.mismatch in ("mask_sequence", "mask_geometric"):
            why["sequence_ids"] = "loss.mismatch"
        if self.kl_coef and self.kl_anchor == "reference":
            why["reference_logprobs"] = "loss.kl_coef"
        if self.entropy_coef:
            why["entropy"] = "loss.entropy_coef (with its gradient)"
        if self.resolved_aggregation != "token_mean":
            why["token_weights"] = "loss.aggregation" if self.aggregation else "loss.name"
        return why

    @model_validator(mode="before")
    @classmethod
    def _expand_alias(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("name"), str) and values["name"] in LOSS_ALIASES:
            alias = LOSS_ALIASES[values["name"]]
            return {**alias, **values, "name": alias["name"]}
        return values

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> LossConfig:
        for key, (applies, where) in _APPLIES.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and not applies(self):
                raise ValueError(f"{key} = {value} has no effect on the loss {self.name!r}; remove it or use {where}")
        return self

    @model_validator(mode="after")
    def _values_fit(self) -> LossConfig:
        for key in ("divergence_threshold_low", "divergence_threshold_high"):
            value = getattr(self, key)
            if value is not None and (self.name.endswith("_tv") or self.name == "ipo") and value > 1:
                raise ValueError(f"{key} = {value}: a total variation never exceeds 1; the paper uses 0.15 to 0.2")
        for key, (low, high) in {"ratio_floor": self.ratio_limits, "mismatch_low": self.mismatch_limits}.items():
            if low > high:
                raise ValueError(f"{key} = {low} is above the upper limit {high}; no ratio fits in between")
        if self.mismatch == "truncate" and self.name != "ppo_decoupled":
            raise ValueError(
                f"mismatch = 'truncate' has no effect on the loss {self.name!r}, whose weight pi / mu is capped by "
                "ratio_cap; use that, or a mask_* mode, or the loss ppo_decoupled"
            )
        if self.form == "reinforce" and self.is_surrogate:
            raise ValueError(f"form = 'reinforce' does not exist for {self.name!r}, a clipped surrogate; remove it")
        if self.form == "ratio" and self.name in ("drpo", "score_centering"):
            raise ValueError(
                f"form = 'ratio' does not exist for {self.name!r}, whose weight is no clipped ratio; remove it"
            )
        if self.name == "gspo" and self.resolved_aggregation != "seq_mean_token_mean":
            raise ValueError(f"aggregation = {self.aggregation!r}: gspo is defined by seq_mean_token_mean; remove it")
        if (self.horizon is None) == self.resolved_aggregation.endswith("_norm"):
            raise ValueError(
                f"horizon = {self.horizon} with aggregation = {self.resolved_aggregation!r}: the *_norm aggregations, "
                "and only they, need horizon; the longest response allowed (rollout.max_new_tokens) is usual"
            )
        return self


def _has_thresholds(config: LossConfig) -> bool:
    return config.is_dppo or config.name in ("drpo", "ipo")


def _is_topk_dppo(config: LossConfig) -> bool:
    return config.is_dppo and config.is_topk


def _has_cap(config: LossConfig) -> bool:
    return not config.is_surrogate and not (config.centers_score and config.centering != "truncate")


def _limits_mismatch(config: LossConfig) -> bool:
    return config.mismatch != "none" or (config.centers_score and config.centering == "mask")


def _clips_ratios(config: LossConfig) -> bool:
    return config.is_surrogate or config.name in ("grpo", "minirl")


_APPLIES: Mapping[str, tuple[Callable[[LossConfig], bool], str]] = {
    "divergence_threshold_low": (_has_thresholds, "a dppo_* loss, drpo or ipo"),
    "divergence_threshold_high": (_has_thresholds, "a dppo_* loss, drpo or ipo"),
    "clip_ratio_low": (_clips_ratios, "grpo, minirl, gspo or ppo_*"),
    "clip_ratio_high": (_clips_ratios, "grpo, minirl, gspo or ppo_*"),
    "ratio_cap": (_has_cap, "a loss without a clipped surrogate (score_centering: with centering = 'truncate')"),
    "ratio_floor": (lambda c: c.name == "cispo", "cispo"),
    "dual_clip": (lambda c: c.name.startswith("ppo_"), "ppo_clip or ppo_decoupled"),
    "topk": (lambda c: c.is_topk, "dppo_topk_tv, dppo_topk_kl or score_centering"),
    "topk_eviction": (_is_topk_dppo, "dppo_topk_tv or dppo_topk_kl"),
    "direction": (_is_topk_dppo, "dppo_topk_tv or dppo_topk_kl (a Binary divergence predicts what it has)"),
    "tail": (lambda c: c.direction == "predictive", "direction = 'predictive'"),
    "centering": (lambda c: c.centers_score, "score_centering"),
    "mismatch_low": (_limits_mismatch, "mismatch other than 'none', or centering = 'mask'"),
    "mismatch_high": (_limits_mismatch, "mismatch other than 'none', or centering = 'mask'"),
}
"""Key -> whether it does something, and with what it would. A key that does nothing is a mistake worth an error."""
