"""The section ``[reward]``: one reward function or several, their options, shaping and limits."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, read_options
from megatron_dppo.config.section import Section

Signature = Literal["auto", "megatron_dppo", "slime", "verl", "trl"]
_OWN_PARTS = ("score", "format", "overlong")
"""Names under ``rollout/reward/`` that are not those of functions."""


def _check_function(function: str, signature: Signature, options: dict[str, Any]) -> None:
    if function not in BUILT_IN_REWARDS:
        return
    if signature != "auto":
        raise ValueError(
            f"signature = {signature!r} is for a function of your own, but function = {function!r} is built in; "
            "remove it"
        )
    read_options(function, options)


class RewardFunctionConfig(Section):
    """One of several reward functions. ``NAME`` is that of its score in the log, ``rollout/reward/NAME``."""

    function: str
    """As ``reward.function``."""
    weight: float = 1.0
    """Of its score in the sum; may be negative, and 0 = it is only logged."""
    eval: bool = False
    """``eval/accuracy`` is this function's score alone (of one function at most); without one it is the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """As ``reward.options``."""
    signature: Signature = "auto"
    """As ``reward.signature``."""
    timeout_seconds: float | None = Field(None, gt=0)
    """None = ``reward.timeout_seconds``."""
    num_workers: int | None = Field(None, ge=1)
    """None = ``reward.num_workers``."""
    async_concurrency: int | None = Field(None, ge=1)
    """None = ``reward.async_concurrency``."""

    @model_validator(mode="after")
    def _options_fit(self) -> RewardFunctionConfig:
        _check_function(self.function, self.signature, self.options)
        return self


class RewardConfig(Section):
    """Rewards (``docs/rewards.md``)."""

    function: str = "math"
    """``math`` (last boxed answer or Answer: line), ``reasoning_gym``, ``words`` (the share of the label's words),
    ``none`` (0: a teacher is the only signal), or ``module:function`` or ``path/to/file.py:function`` of your own;
    ``""`` = those of ``[reward.functions.NAME]``."""
    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """Several functions by name, instead of one: the reward is the weighted sum of their scores."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the function gets by name, beside the sample."""
    signature: Signature = "auto"
    """How your own function is called; ``auto`` = by the names of its parameters."""
    partial_credit: bool = False
    """Keep reasoning-gym's scores below 1 (instead of 0 for them)."""
    format: float = Field(0.0, ge=0, lt=1)
    """Added to the score of a response with exactly one closed answer and at most one, closed, thinking block."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """The last tokens before ``rollout.max_new_tokens``, over which the punishment grows linearly; 0 = none (DAPO)."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Subtracted from the score of a response of ``rollout.max_new_tokens`` tokens."""
    kl_coef: float = Field(0.0, ge=0)
    """Taken from the reward: this times the KL of the rollout policy to the reference, token by token (PPO, RLHF)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = log mu - log ref, unbiased; k2 = half its square; k3 = ref / mu - 1 + k1, unbiased and never negative."""
    timeout_seconds: float = Field(10.0, gt=0)
    """Limit for one sample, or for one call of a function for batches; a slower one is stopped and counted as
    failed."""
    num_workers: int = Field(1, ge=1)
    """Processes per rank that compute slow rewards."""
    async_concurrency: int = Field(64, ge=1)
    """Samples that an async function has under way at a time in one process."""

    @property
    def eval_score_name(self) -> str:
        """What the mean over held-out answers is: ``accuracy`` where each is right or wrong, else ``score``."""
        is_exact = self.function == "math" or (self.function == "reasoning_gym" and not self.partial_credit)
        return "accuracy" if is_exact else "score"

    @model_validator(mode="before")
    @classmethod
    def _several_stand_alone(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("functions"):
            return values
        if values.get("function", "") != "":
            raise ValueError(
                f"function = {values['function']!r} and [reward.functions.NAME] exclude each other; move the function "
                "to a section of its own among them, or remove them"
            )
        for key in ("signature", "options", "partial_credit"):
            default = cls.model_fields[key].get_default(call_default_factory=True)
            if values.get(key, default) != default:
                raise ValueError(
                    f"reward.{key} belongs to reward.function, and there are [reward.functions.NAME]: write it into "
                    "the section of one of them (partial_credit goes to its options)"
                )
        return {**values, "function": ""}

    @field_validator("functions")
    @classmethod
    def _names_fit(cls, value: dict[str, RewardFunctionConfig]) -> dict[str, RewardFunctionConfig]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in _OWN_PARTS:
                raise ValueError(
                    f"the name {name!r} becomes that of a metric; use letters, digits, '_', '.' and '-', and none of "
                    f"{', '.join(_OWN_PARTS)}"
                )
        if len(marked := [name for name, each in value.items() if each.eval]) > 1:
            raise ValueError(f"eval = true of {' and '.join(marked)}: eval/accuracy is one score; leave it to one")
        if value and not any(each.weight for each in value.values()):
            raise ValueError("every weight is 0, so that there is no reward; set one above or below 0")
        return value

    @model_validator(mode="after")
    def _options_have_a_meaning(self) -> RewardConfig:
        if self.function == "" and not self.functions:
            raise ValueError("function = '' without [reward.functions.NAME]: name a function")
        if self.partial_credit and self.function != "reasoning_gym":
            raise ValueError(
                f"partial_credit = true is an option of function = 'reasoning_gym', but function = {self.function!r}; "
                "remove it"
            )
        _check_function(self.function, self.signature, self.options)
        if self.overlong_penalty != 1 and not self.overlong_buffer_tokens:
            raise ValueError(
                f"overlong_penalty = {self.overlong_penalty} has no effect without overlong_buffer_tokens; set it to "
                "the number of tokens over which the punishment grows"
            )
        return self
