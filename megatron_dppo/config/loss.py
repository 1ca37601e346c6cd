"""The ``[loss]`` section: the policy losses, their options, and the names that other frameworks give them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.loss_aliases import LOSS_ALIASES
from megatron_dppo.config.loss_keys import APPLIES, check_values, reasons
from megatron_dppo.config.section import Section
from megatron_dppo.config.user_functions import FunctionNeeds, UserFunction, load_user_function, loaded
from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import is_function_name

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
    "trm",
    "cppo",
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

    ``name`` may be an alias (``verl/dppo_kl``), which docs/loss.md lists, or a function of the user's.

    Example:
        >>> sorted(LossConfig(name="dppo_topk_tv", topk=8).required_inputs)
        ['rollout_logprobs', 'rollout_topk_logprobs', 'topk_logprobs', 'topk_valid']
        >>> config = LossConfig(name="verl/dppo_kl")
        >>> config.name, config.divergence_threshold_high, config.ratio_cap
        ('dppo_binary_kl', 0.2, 3.0)
    """

    name: LossName | str = "dppo_binary_tv"
    """A built-in loss, an alias, or a function of your own: ``path/to/file.py:function`` or ``module:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Only a function of your own in ``name``: what it gets by name, beside its inputs."""
    mask: str | None = None
    """A function of your own, ``path/to/file.py:function``: a bool for each token (False = dropped, beside what the
    loss drops itself) or a weight of its term."""
    mask_options: dict[str, Any] = Field(default_factory=dict)
    """Only with ``mask``: what it gets by name, beside its inputs."""
    divergence_threshold_low: float | None = Field(None, gt=0)
    """Trust region for negative advantages (``ipo``: for pi < mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Trust region for positive advantages (``ipo``: for pi > mu); None = 0.15 (TV) or 0.05 (KL), 0.3 for ``ipo``."""
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """C in min(r, C) (``drpo``: of the whole weight); ``off`` = no cap; None = 5 for ``dppo_*`` and ``cispo``, 2 for
    ``score_centering``, else no cap."""
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
    divergence: Literal["sampled", "binary", "topk"] | None = None
    """Only ``trm`` (None = ``sampled``: estimates of KL(mu || pi) from the sampled token; or its Binary or Top-K form)
    and ``cppo`` (None = ``binary``; total variation)."""
    sequence_max: Annotated[float, Field(gt=0)] | Literal["off"] = 0.05
    """Only ``trm``: a sequence with a token above this is dropped."""
    sequence_mean: Annotated[float, Field(gt=0)] | Literal["off"] = 0.001
    """Only ``trm``: a sequence whose mean over its tokens is above this is dropped."""
    position_floor: float = Field(0.8, gt=0, le=1)
    """Only ``cppo``: the weight of a response's last divergence; that of the first is 1."""
    prefix_budget: float = Field(0.02, gt=0)
    """Only ``cppo``: least mean of the weighted divergences that any prefix may have."""
    prefix_budget_max: float | None = Field(None, gt=0)
    """Only ``cppo``: that of a sequence is the 90th percentile of its divergences, at most this; None = twice
    ``prefix_budget``."""
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

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # the tables of options have no hash

    @property
    def own_loss(self) -> UserFunction | None:
        """The user's function in ``name``."""
        return loaded(self.name, "loss.name") if is_function_name(self.name) else None

    @property
    def own_mask(self) -> UserFunction | None:
        """The user's function in ``mask``."""
        return None if self.mask is None else loaded(self.mask, "loss.mask")

    @property
    def own_needs(self) -> list[FunctionNeeds]:
        """Of the user's functions."""
        return [function.needs for function in (self.own_loss, self.own_mask) if function is not None]

    @property
    def is_dppo(self) -> bool:
        """Whether the loss is one of the DPPO variants."""
        return self.name.startswith("dppo_") and not is_function_name(self.name)

    @property
    def is_topk(self) -> bool:
        """Whether the rollout's Top-K is needed."""
        return self.decides_on_topk or any(needs.topk for needs in self.own_needs)

    @property
    def decides_on_topk(self) -> bool:
        """Whether the built-in loss itself needs it."""
        is_dppo = self.is_dppo and self.name.startswith("dppo_topk_")
        return is_dppo or self.centers_score or self.resolved_divergence == "topk"

    @property
    def resolved_divergence(self) -> Literal["sampled", "binary", "topk"] | None:
        """``divergence`` with the default of the loss filled in; None where the name says it, or nothing does."""
        return self.divergence or {"trm": "sampled", "cppo": "binary"}.get(self.name)  # type: ignore[return-value]

    @property
    def prefix_budgets(self) -> tuple[float, float]:
        """(least, largest) with the default filled in."""
        largest = self.prefix_budget_max
        return (self.prefix_budget, 2 * self.prefix_budget if largest is None else largest)

    @property
    def centers_score(self) -> bool:
        """Whether the sampler's expected score is subtracted."""
        return self.name == "score_centering"

    @property
    def uses_anchor(self) -> bool:
        """Whether the loss compares with log-probabilities that the trainer recomputed at the rollout's weights."""
        return self.mismatch_by_anchor or any(needs.anchor for needs in self.own_needs)

    @property
    def mismatch_by_anchor(self) -> bool:
        """Whether ``mismatch`` compares trainer and engine at the same weights, else pi and mu."""
        recomputes = self.is_dppo and self.name.startswith("dppo_recompute_")
        return recomputes or self.name in ("minirl", "ppo_decoupled")

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
        if self.ratio_cap == "off" or (self.centers_score and self.centering != "truncate"):
            cap = float("inf")
        elif self.ratio_cap is None:
            cap = 5.0 if self.is_dppo else {"cispo": 5.0, "score_centering": 2.0}.get(self.name, float("inf"))
        else:
            cap = self.ratio_cap
        floor = float("-inf") if self.name == "drpo" else self.ratio_floor or 0.0
        return (floor, cap)

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
        return frozenset(reasons(self))

    def reason(self, name: str) -> str:
        """The setting because of which the loss needs the input ``name``."""
        return reasons(self)[name]

    @model_validator(mode="before")
    @classmethod
    def _expand_alias(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("name"), str) and values["name"] in LOSS_ALIASES:
            merged = {**LOSS_ALIASES[values["name"]], **values, "name": LOSS_ALIASES[values["name"]]["name"]}
            if not merged.get("kl_coef"):  # taken away beside the alias, whose other keys of the penalty go with it
                merged = {key: value for key, value in merged.items() if key in values or not key.startswith("kl_")}
            return merged
        return values

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name in get_args(LossName) or is_function_name(name):
            return name
        known = [*get_args(LossName), *LOSS_ALIASES]
        close = get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"no such loss{hint} Expected one of {', '.join(get_args(LossName))}, an alias (docs/loss.md), or "
            "'path/to/file.py:function'"
        )

    @model_validator(mode="after")
    def _functions_load(self) -> LossConfig:
        try:
            if is_function_name(self.name):
                load_user_function(self.name, "loss.name", self.options)
            if self.mask is not None:
                mask = load_user_function(self.mask, "loss.mask", self.mask_options).needs
                if mask.topk_gradient or mask.entropy_gradient or not mask.zero_advantage:
                    raise FunctionError(
                        f"loss.mask = {self.mask!r} declares topk_gradient, entropy_gradient or zero_advantage: a mask "
                        "has no gradient, so they would do nothing; take them out"
                    )
        except FunctionError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> LossConfig:
        changed = self.changed()
        for key, (applies, where) in APPLIES.items():
            if key in changed and not applies(self):
                value = getattr(self, key)
                raise ValueError(f"{key} = {value} has no effect on the loss {self.name!r}; remove it or use {where}")
        return self

    @model_validator(mode="after")
    def _values_fit(self) -> LossConfig:
        check_values(self)
        return self
