"""The ``[loss]`` section: the keys that all losses share.

The keys of one loss are in its file in ``megatron_dppo/losses``, in a class derived from ``LossConfig``. ``name``
selects the class (a discriminated union).
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, PlainValidator, PrivateAttr, SerializeAsAny, field_validator, model_validator
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
from megatron_dppo.config.user_functions import (
    FunctionNeeds,
    UserFunction,
    describe_user_function,
    functions_as_text,
    get_user_function,
    load_user_mask,
    may_execute,
)
from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import is_function_name

Aggregation = Literal[
    "token_mean", "token_sum", "token_sum_norm", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
Form = Literal["reinforce", "ratio"]
Mismatch = Literal["none", "truncate", "mask_token", "mask_sequence", "mask_geometric"]
TopKSummary = Literal["divergence", "rate"]
Statistic = Callable[..., float]
"""Function ``(losses.BatchTokens) -> number``. Torch is not known here, so the argument has no type."""


class LossConfig(Section):
    """The policy loss. Names and defaults follow arXiv 2602.04879 and docs/loss.md.

    ``name`` may also be an alias such as ``verl/dppo_kl`` (docs/loss_details.md) or a user's loss. It determines which
    further keys exist. A key of another loss is an error.

    Example:
        >>> sorted(LossConfig(name="dppo_topk_tv", topk=8).required_inputs)
        ['rollout_logprobs', 'rollout_topk_logprobs', 'topk_logprobs', 'topk_valid']
        >>> config = LossConfig(name="verl/dppo_kl")
        >>> config.name, config.divergence_threshold_high, config.ratio_cap
        ('dppo_binary_kl', 0.2, 3.0)
    """

    name: str = DEFAULT_LOSS
    """A built-in loss, an alias, or a user's function or class: ``path/to/file.py:name`` or ``module:name``. The
    default is DPPO with the binary total variation, which needs no Top-K."""
    mask: str | None = None
    """User function ``path/to/file.py:function`` that masks tokens in addition to the loss. It returns a bool per token
    (False masks the token) or a weight of its term. null adds no mask."""
    mask_options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of ``mask``, in addition to its inputs."""
    topk: int = Field(20, ge=1)
    """K: the number of the rollout's most probable tokens per position, for losses and masks that need them."""
    form: Form | None = None
    """Reported value. ``reinforce`` is ``-A min(r, C) log pi``. ``ratio`` is ``-A min(r, C)``, without a gradient above
    C or below ``ratio_floor``. null uses ``reinforce`` if the loss has a choice. Clipped surrogates have only
    ``ratio``."""
    centering: bool = False
    """Score centering: subtract the expected gradient of the loss under the sampler, so that the sampler's choice alone
    adds nothing. Exact on the rollout's Top-K. For losses of single tokens that read pi and mu alone."""
    mismatch: Mismatch = "none"
    """Correction for the mismatch between trainer and engine: ``truncate`` truncates the weights, the ``mask_*`` modes
    mask tokens or sequences outside the limits."""
    mismatch_low: float | None = Field(None, ge=0)
    """Lower limit of the ratio. null uses 0.5 for the masks and 0 for ``truncate``."""
    mismatch_high: float | None = Field(None, gt=0)
    """Upper limit of the ratio. null uses 2."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty, which applies to every token of the loss mask. 0 disables it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || kl_target) from one token: log ratio (k1), half its square (k2), or r - 1 - log r (k3)."""
    kl_target: Literal["reference", "rollout"] = "reference"
    """Policy that the penalty pulls towards."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. 0 disables it."""
    aggregation: Aggregation | None = None
    """Reduction of the token losses to one number. null uses ``token_mean``, or ``seq_mean_token_mean`` for
    ``gspo``."""
    horizon: int | None = Field(None, ge=1)
    """Number of tokens that the ``*_norm`` aggregations divide by, usually ``rollout.max_new_tokens``. null for the
    other aggregations."""

    _has_text: bool = PrivateAttr(False)

    forms: ClassVar[tuple[Form, ...]] = ("reinforce", "ratio")
    """Values that ``form`` may have, the default first. Empty if the loss has no such choice."""
    default_aggregation: ClassVar[Aggregation] = "token_mean"
    """Value of ``aggregation`` if it is null."""
    mismatch_uses_recomputed: ClassVar[bool] = False
    """True if ``mismatch`` compares trainer and engine at the same weights (pi' and mu), False for pi and mu."""
    can_center: ClassVar[bool] = False
    """True if ``decide`` works on ids that were not sampled: on tokens of shape [T, n] that have no pi', sequences or
    user's columns. Allows ``centering``."""
    truncates_mismatch: ClassVar[bool] = False
    """True if the weight has a separate factor pi' / mu, which ``mismatch = "truncate"`` limits."""

    def __new__(cls, **values: Any) -> Self:
        """Create an object of the class that ``name`` selects."""
        # LossConfig(name="grpo") gives the class of that loss, so that callers need not know the classes.
        selected = cast(type[LossConfig], loss_class_for(values)) if cls is LossConfig else cls
        selected._check_names(values)
        return cast(Self, super().__new__(selected))

    @classmethod
    def _check_names(cls, values: Mapping[str, Any]) -> None:
        """Check that every keyword of a call is a key of some loss; pydantic would not name the nearest one."""
        if cls.model_config.get("extra") != "forbid":
            return  # A user's class that was not imported.
        known = [*dict.fromkeys([*cls.model_fields, *LossConfig.known_fields()])]
        for key in values:
            if key not in known:
                near = dict.fromkeys([*(name for name in known if key in name), *get_close_matches(key, known)])
                hint = f"did you mean {' or '.join(map(repr, list(near)[:4]))}?" if near else f"it has {sorted(known)}."
                raise ValueError(f"LossConfig has no key {key!r} = {values[key]!r}; {hint}")

    def __reduce__(self) -> Any:
        # Rebuild by name: the class of a user's loss lives in a file that pickle cannot import.
        values = {"name": self.name, **self.model_dump(exclude_unset=True)}
        return (partial(_rebuild, values, has_text=self._has_text), ())

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # Tables of options are not hashable.

    @property
    def needs(self) -> FunctionNeeds:
        """Inputs that the loss itself needs, in addition to pi, mu and the advantage of each token."""
        return FunctionNeeds(recomputed=self.mismatch_uses_recomputed, zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Result of the sums over the Top-K slots that the loss reads. None if it reads single slots.

        ``divergence`` is the divergence alone, ``rate`` also its rate along the update.
        """

    @property
    def evicts_topk(self) -> bool:
        """True if a sampled token outside the Top-K replaces the K-th."""
        return False

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """``(floor, cap)`` of the weight; 0 and infinity if there is none."""
        return (0.0, float("inf"))

    def unused_keys(self) -> dict[str, str]:
        """Return each key that has no effect with the current values, and the setting that it needs."""
        unused = {}
        if self.mask is None:
            unused["mask_options"] = "mask"
        if not self.is_topk:
            unused["topk"] = (
                "a loss on the Top-K, centering = true, divergence = 'topk', or a function that needs(topk=True)"
            )
        if not self.forms:
            unused["form"] = "a loss with this choice"
        if self.mismatch == "none":
            needed = "mismatch other than 'none'"
            unused |= {"mismatch_low": needed, "mismatch_high": needed}
        if self.kl_coef == 0:
            unused |= {"kl_estimator": "kl_coef above 0", "kl_target": "kl_coef above 0"}
        return unused

    def check(self) -> None:
        """Check that the values are compatible. Losses extend it."""
        low, high = self.mismatch_limits
        if low > high:
            raise ValueError(
                f"mismatch_low = {low} is above the upper limit {high}, so that no ratio is inside; lower mismatch_low"
            )
        if self.mismatch == "truncate" and not self.truncates_mismatch:
            raise ValueError(
                f"mismatch = 'truncate' has no effect on the loss {self.name!r}: ratio_cap caps its weight pi / mu. "
                "Use ratio_cap, a mask_* mode, or the loss ppo_decoupled"
            )
        if self.centering and not self.can_center:
            raise ValueError(
                f"centering = true does not exist for the loss {self.name!r}: the weight of an id must follow from "
                "its pi and mu, and this loss reads recomputed log-probabilities, whole sequences, or is a user's. "
                "Fix: remove it, or use a loss of single tokens such as dppo_binary_tv"
            )
        if self.form is not None and self.form not in self.forms:
            raise ValueError(
                f"form = {self.form!r} does not exist for {self.name!r}, which always uses {self.forms[0]!r}; remove it"
            )
        # Either horizon is missing where it is needed, or it is set where it has no effect.
        if (self.horizon is None) == self.resolved_aggregation.endswith("_norm"):
            raise ValueError(
                f"horizon = {self.horizon} with aggregation = {self.resolved_aggregation!r}: only the *_norm "
                "aggregations use horizon, and they need it. Set it to the maximum response length "
                "(rollout.max_new_tokens), or remove it"
            )

    def load_functions(self) -> None:
        """Load the user functions."""
        if self.mask is not None:
            load_user_mask(self.mask, self.mask_options)

    def input_reasons(self) -> dict[str, str]:
        """Return the fields of LossInputs that the loss needs, each with the setting that needs it."""
        reasons = {"rollout_logprobs": "loss.name"}
        if self.user_mask is not None:
            reasons |= dict.fromkeys(self.user_mask.needs.inputs, "loss.mask")
        reasons |= dict.fromkeys(self.needs.inputs, "loss.name")
        if self.centering:
            reasons |= dict.fromkeys(FunctionNeeds(topk=True).inputs, "loss.centering")
        if self.mismatch in ("mask_sequence", "mask_geometric"):
            reasons["sequence_ids"] = "loss.mismatch"
        if self.kl_coef and self.kl_target == "reference":
            reasons["reference_logprobs"] = "loss.kl_coef"
        # The entropy itself is always computed; only the bonus needs its gradient.
        if self.entropy_coef:
            reasons["entropy"] = "loss.entropy_coef (with its gradient)"
        if self.resolved_aggregation != "token_mean":
            reasons["token_weights"] = "loss.aggregation" if self.aggregation else "loss.name"
        return reasons

    def step_statistics(self) -> Mapping[str, Statistic]:
        """Return the numbers of all tokens of a step that the loss reads, by name (``Tokens.statistic``).

        They are computed once a step, with the weights that it starts with. It takes a forward pass.
        """
        return {}

    def update_statistics(self) -> Mapping[str, Statistic]:
        """Return the numbers of all tokens of an update that the loss reads, by name (``Tokens.statistic``).

        They are computed before each update, with its weights. It takes a forward pass.
        """
        return {}

    def declared_statistics(self) -> dict[str, Statistic]:
        """Return the statistics of step and update together, by name."""
        return {**self.step_statistics(), **self.update_statistics()}

    def resolved_defaults(self) -> dict[str, object]:
        """Return the value in effect for each key whose ``None`` stands for a default of the loss."""
        return {
            "form": self.resolved_form,
            "mismatch_low": self.mismatch_limits[0],
            "mismatch_high": self.mismatch_limits[1],
            "aggregation": self.resolved_aggregation,
        }

    @property
    def has_text(self) -> bool:
        """True if ``name`` or ``mask`` is a user function that was not imported, so that the loss cannot be computed.

        Its needs are then known as far as a decorator in its file declares them.
        """
        return self._has_text

    @property
    def user_mask(self) -> UserFunction | None:
        """The user function in ``mask``. None if there is none."""
        return None if self.mask is None else self.get_function(self.mask, "loss.mask")

    def get_function(self, name: str, setting: str) -> UserFunction:
        """Return a user function of the loss: the loaded one, or with ``has_text`` its description."""
        return describe_user_function(name, setting) if self._has_text else get_user_function(name, setting)

    @property
    def is_topk(self) -> bool:
        """True if the loss or the mask needs the rollout's Top-K."""
        return self.needs.topk or self.centering or (self.user_mask is not None and self.user_mask.needs.topk)

    @property
    def reads_topk_slots(self) -> bool:
        """True if loss or mask read single slots of the Top-K, not only sums over them."""
        by_mask = self.user_mask is not None and self.user_mask.needs.topk
        return by_mask or self.centering or (self.needs.topk and self.topk_summary is None)

    @property
    def uses_recomputed_logprobs(self) -> bool:
        """True if the loss needs log-probabilities that the trainer recomputes at the rollout's weights."""
        return self.needs.recomputed or (self.user_mask is not None and self.user_mask.needs.recomputed)

    @property
    def mismatch_limits(self) -> tuple[float, float]:
        """``(low, high)`` of the mismatch correction with the defaults filled in."""
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
        """Fields of LossInputs that this loss needs and other losses may not need."""
        return frozenset(self.input_reasons())

    def input_reason(self, name: str) -> str:
        """Return the setting that needs the input ``name``."""
        return self.input_reasons()[name]

    @classmethod
    def known_fields(cls) -> Mapping[str, FieldInfo]:
        """Return the keys of all losses, shared keys first."""
        if cls is not LossConfig:
            return cls.model_fields
        fields = dict(cls.model_fields)
        for kind in (*loss_classes().values(), user_loss_class()):
            for key, field in kind.model_fields.items():
                fields.setdefault(key, field)
        return fields

    @model_validator(mode="before")
    @classmethod
    def _keys_belong_to_the_loss(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        values = expand_alias(values)
        if not is_loss_name(values.get("name", DEFAULT_LOSS)):
            # Keep only the name: without the class of the loss, the other keys cannot be checked.
            return {"name": values["name"]}
        return drop_keys_of_other_losses(cls, values)

    @field_validator("name", mode="before")
    @classmethod
    def _name_is_known(cls, name: object) -> object:
        if isinstance(name, str) and not is_loss_name(name):
            raise ValueError(unknown_loss_message(name))
        return name

    @model_validator(mode="after")
    def _functions_load(self) -> Self:
        if not may_execute():
            self._has_text = is_function_name(self.name) or self.mask is not None
            return self
        try:
            self.load_functions()
        except FunctionError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        if self._has_text:
            return self  # what its functions read is unknown
        unused = self.unused_keys()
        for key in self.changed_keys():
            if key in unused:
                value = getattr(self, key)
                raise ValueError(
                    f"{key} = {value} has no effect on the loss {self.name!r}; remove it or use {unused[key]}"
                )
        self.check()
        return self


def _rebuild(values: Mapping[str, Any], *, has_text: bool) -> LossConfig:
    """Return the loss of pickled values; one whose functions were not imported stays so."""
    if not has_text:
        return LossConfig(**values)
    with functions_as_text():
        return LossConfig(**values)


def _validated(values: object) -> LossConfig:
    if isinstance(values, LossConfig):
        return values
    if not isinstance(values, dict):
        raise ValueError(f"expected a table of keys, got {type(values).__name__}; write [loss] name = ...")
    return cast(LossConfig, loss_class_for(values).model_validate(values))


AnyLoss = Annotated[SerializeAsAny[LossConfig], PlainValidator(_validated)]
"""The ``[loss]`` section of a configuration: an object of the class that its name selects."""
