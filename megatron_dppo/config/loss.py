"""The ``[loss]`` section: the keys that all losses share.

The keys of one loss stand in its file in ``megatron_dppo/losses``, as a class derived from ``LossConfig``; ``name``
chooses it (a discriminated union).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, PlainValidator, SerializeAsAny, field_validator, model_validator
from pydantic.fields import FieldInfo

from megatron_dppo.config.loss_aliases import expand_alias
from megatron_dppo.config.loss_registry import (
    DEFAULT_LOSS,
    drop_keys_of_other_losses,
    is_loss_name,
    loss_class_for,
    loss_classes,
    unknown_loss_message,
    user_loss_class,
)
from megatron_dppo.config.section import Section
from megatron_dppo.config.user_functions import FunctionNeeds, UserFunction, get_user_function, load_user_mask
from megatron_dppo.errors import FunctionError

Aggregation = Literal[
    "token_mean", "token_sum", "token_sum_norm", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
Form = Literal["reinforce", "ratio"]
Mismatch = Literal["none", "truncate", "mask_token", "mask_sequence", "mask_geometric"]
TopKSummary = Literal["divergence", "rate"]


class LossConfig(Section):
    """The policy loss: keys of every loss. Source of names and defaults: arXiv 2602.04879 and docs/loss.md.

    ``name`` may be an alias (``verl/dppo_kl``), which docs/loss.md lists, or a loss of the user's. It says which
    further keys there are; those of another loss are unknown.

    Example:
        >>> sorted(LossConfig(name="dppo_topk_tv", topk=8).required_inputs)
        ['rollout_logprobs', 'rollout_topk_logprobs', 'topk_logprobs', 'topk_valid']
        >>> config = LossConfig(name="verl/dppo_kl")
        >>> config.name, config.divergence_threshold_high, config.ratio_cap
        ('dppo_binary_kl', 0.2, 3.0)
    """

    name: str = DEFAULT_LOSS
    """A built-in loss, an alias, or a function or class of your own: ``path/to/file.py:name`` or ``module:name``."""
    mask: str | None = None
    """A function of your own, ``path/to/file.py:function``: a bool for each token (False = dropped, beside what the
    loss drops itself) or a weight of its term."""
    mask_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of ``mask`` by name, beside its inputs."""
    topk: int = Field(20, ge=1)
    """K, the rollout's most probable tokens per position, for losses and masks that need them."""
    form: Form | None = None
    """Reported value, ``-A min(r, C) log pi`` or ``-A min(r, C)`` (no gradient above C, nor below ``ratio_floor``);
    None = reinforce where there is a choice. Clipped surrogates have ``ratio`` alone."""
    mismatch: Mismatch = "none"
    """Weights against the mismatch of trainer and engine: truncate them, or drop the tokens or sequences outside."""
    mismatch_low: float | None = Field(None, ge=0)
    """Lower limit; None = 0.5 for the masks, 0 for ``truncate``."""
    mismatch_high: float | None = Field(None, gt=0)
    """Upper limit; None = 2."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty, added for every token of the loss mask."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || kl_anchor) from one token: log ratio, half its square, or r - 1 - log r."""
    kl_anchor: Literal["reference", "rollout"] = "reference"
    """Policy that the penalty pulls towards."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation | None = None
    """Reduction of the tokens to one number; None = token_mean, but seq_mean_token_mean for ``gspo``."""
    horizon: int | None = Field(None, ge=1)
    """Tokens that the ``*_norm`` aggregations divide by, usually the longest response allowed."""

    forms: ClassVar[tuple[Form, ...]] = ("reinforce", "ratio")
    """Values that ``form`` may have, the default first; empty where the loss has no such choice."""
    default_aggregation: ClassVar[Aggregation] = "token_mean"
    mismatch_uses_recomputed: ClassVar[bool] = False
    """``mismatch`` compares trainer and engine at the same weights (pi' and mu), else pi and mu."""
    truncates_mismatch: ClassVar[bool] = False
    """The weight has a factor pi' / mu, which ``mismatch = "truncate"`` limits."""

    def __new__(cls, **values: Any) -> Self:
        """Make an object of the class that ``name`` chooses."""
        return cast(Self, super().__new__(loss_class_for(values) if cls is LossConfig else cls))

    def __reduce__(self) -> Any:
        return (partial(LossConfig, **{"name": self.name, **self.model_dump(exclude_unset=True)}), ())

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # the tables of options have no hash

    @property
    def needs(self) -> FunctionNeeds:
        """Inputs that the loss itself needs beside pi, mu and the advantage of each token."""
        return FunctionNeeds(zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Part of the Top-K that sums over the slots give: the divergence, or also its rate; None = single slots."""

    @property
    def evicts_topk(self) -> bool:
        """A sampled token outside the Top-K replaces the K-th."""
        return False

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """(floor, cap) of the weight; 0 and infinity where there is none."""
        return (0.0, float("inf"))

    def unused_keys(self) -> dict[str, str]:
        """Return the keys that do nothing beside the values of the others -> what they would need."""
        idle = {}
        if self.mask is None:
            idle["mask_options"] = "mask"
        if not self.is_topk:
            idle["topk"] = "a loss on the Top-K, divergence = 'topk', or a function that needs(topk=True)"
        if not self.forms:
            idle["form"] = "a loss that has the choice"
        if self.mismatch == "none":
            why = "mismatch other than 'none', or centering = 'mask'"
            idle |= {"mismatch_low": why, "mismatch_high": why}
        if self.kl_coef == 0:
            idle |= {"kl_estimator": "kl_coef above 0", "kl_anchor": "kl_coef above 0"}
        return idle

    def check(self) -> None:
        """Check that the values fit each other; a loss extends it.

        Raises:
            ValueError: they do not.
        """
        low, high = self.mismatch_limits
        if low > high:
            raise ValueError(f"mismatch_low = {low} is above the upper limit {high}; no ratio fits in between")
        if self.mismatch == "truncate" and not self.truncates_mismatch:
            raise ValueError(
                f"mismatch = 'truncate' has no effect on the loss {self.name!r}, whose weight pi / mu is capped by "
                "ratio_cap; use that, or a mask_* mode, or the loss ppo_decoupled"
            )
        if self.form is not None and self.form not in self.forms:
            raise ValueError(
                f"form = {self.form!r} does not exist for {self.name!r}, which is {self.forms[0]!r} always; remove it"
            )
        if (self.horizon is None) == self.resolved_aggregation.endswith("_norm"):
            raise ValueError(
                f"horizon = {self.horizon} with aggregation = {self.resolved_aggregation!r}: the *_norm aggregations, "
                "and only they, need horizon; the longest response allowed (rollout.max_new_tokens) is usual"
            )

    def load_functions(self) -> None:
        """Load the user's functions.

        Raises:
            FunctionError: one cannot be loaded, or declares what it cannot have.
        """
        if self.mask is not None:
            load_user_mask(self.mask, self.mask_options)

    def input_reasons(self) -> dict[str, str]:
        """Return each field of LossInputs that the loss needs -> the setting because of which."""
        why = {"rollout_logprobs": "loss.name"}
        if self.user_mask is not None:
            why |= dict.fromkeys(self.user_mask.needs.inputs, "loss.mask")
        why |= dict.fromkeys(self.needs.inputs, "loss.name")
        if self.mismatch in ("mask_sequence", "mask_geometric"):
            why["sequence_ids"] = "loss.mismatch"
        if self.kl_coef and self.kl_anchor == "reference":
            why["reference_logprobs"] = "loss.kl_coef"
        if self.entropy_coef:
            why["entropy"] = "loss.entropy_coef (with its gradient)"
        if self.resolved_aggregation != "token_mean":
            why["token_weights"] = "loss.aggregation" if self.aggregation else "loss.name"
        return why

    def resolved_defaults(self) -> dict[str, Any]:
        """Return each key whose ``None`` stands for a value of the loss -> that value."""
        return {
            "form": self.resolved_form,
            "mismatch_low": self.mismatch_limits[0],
            "mismatch_high": self.mismatch_limits[1],
            "aggregation": self.resolved_aggregation,
        }

    @property
    def user_mask(self) -> UserFunction | None:
        """The user's function in ``mask``."""
        return None if self.mask is None else get_user_function(self.mask, "loss.mask")

    @property
    def is_topk(self) -> bool:
        """Whether the rollout's Top-K is needed."""
        return self.needs.topk or (self.user_mask is not None and self.user_mask.needs.topk)

    @property
    def reads_topk_slots(self) -> bool:
        """Whether loss or mask read single slots of the Top-K, not only sums over them."""
        by_mask = self.user_mask is not None and self.user_mask.needs.topk
        return by_mask or (self.needs.topk and self.topk_summary is None)

    @property
    def uses_recomputed_logprobs(self) -> bool:
        """Whether the loss compares with log-probabilities that the trainer recomputed at the rollout's weights."""
        return self.needs.recomputed or (self.user_mask is not None and self.user_mask.needs.recomputed)

    @property
    def mismatch_limits(self) -> tuple[float, float]:
        """(low, high) of the mismatch weights with the defaults filled in."""
        default_low = 0.0 if self.mismatch == "truncate" else 0.5
        low, high = self.mismatch_low, self.mismatch_high
        return (default_low if low is None else low, 2.0 if high is None else high)

    @property
    def resolved_form(self) -> Form:
        """``form`` with the default of the loss filled in."""
        return self.form or (self.forms[0] if self.forms else "reinforce")

    @property
    def resolved_aggregation(self) -> Aggregation:
        """``aggregation`` with the default of the loss filled in."""
        return self.aggregation or self.default_aggregation

    @property
    def required_inputs(self) -> frozenset[str]:
        """Fields of LossInputs that this loss needs and that other losses may do without."""
        return frozenset(self.input_reasons())

    def input_reason(self, name: str) -> str:
        """Return the setting because of which the loss needs the input ``name``."""
        return self.input_reasons()[name]

    @classmethod
    def known_fields(cls) -> Mapping[str, FieldInfo]:
        """Return the keys of all losses, those that all share first."""
        if cls is not LossConfig:
            return cls.model_fields
        fields = dict(cls.model_fields)
        for kind in (*loss_classes().values(), user_loss_class()):
            for key, field in kind.model_fields.items():
                fields.setdefault(key, field)
        return fields

    @model_validator(mode="before")
    @classmethod
    def _keys_belong_to_the_loss(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = expand_alias(values)
        if not is_loss_name(values.get("name", DEFAULT_LOSS)):
            return {"name": values["name"]}  # nothing can be said of the other keys
        return drop_keys_of_other_losses(cls, values)

    @field_validator("name", mode="before")
    @classmethod
    def _name_is_known(cls, name: Any) -> Any:
        if isinstance(name, str) and not is_loss_name(name):
            raise ValueError(unknown_loss_message(name))
        return name

    @model_validator(mode="after")
    def _functions_load(self) -> Self:
        try:
            self.load_functions()
        except FunctionError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        changed, idle = self.changed_keys(), self.unused_keys()
        for key in changed:
            if key in idle:
                value = getattr(self, key)
                raise ValueError(
                    f"{key} = {value} has no effect on the loss {self.name!r}; remove it or use {idle[key]}"
                )
        self.check()
        return self


def _validated(values: Any) -> Any:
    if isinstance(values, LossConfig):
        return values
    if not isinstance(values, dict):
        raise ValueError("expected a table of keys")
    return loss_class_for(values).model_validate(values)


AnyLoss = Annotated[SerializeAsAny[LossConfig], PlainValidator(_validated)]
"""The ``[loss]`` section of a configuration: an object of the class that its name chooses."""
