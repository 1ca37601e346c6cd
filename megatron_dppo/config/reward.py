"""The section ``[reward]``: one reward function or several, their options, shaping and limits."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, read_options
from megatron_dppo.config.section import Section

Signature = Literal["auto", "megatron_dppo", "slime", "verl", "trl"]
_RESERVED_NAMES = ("score", "format", "overlong")
"""Metric names under ``rollout/reward/`` that are no names of functions."""


def _check_function(function: str, signature: Signature, options: dict[str, Any]) -> None:
    if function not in BUILT_IN_REWARDS:
        return
    if signature != "auto":
        raise ValueError(
            f"signature = {signature!r} applies to a user function, but function = {function!r} is built in; remove it"
        )
    read_options(function, options)


class RewardFunctionConfig(Section):
    """One of several reward functions. ``NAME`` names its score in the log, ``rollout/reward/NAME``."""

    function: str
    """Reward function, as in ``reward.function``."""
    weight: float = 1.0
    """Weight of its score in the sum. It may be negative. 0 only logs the score."""
    sources: list[str] = Field(default_factory=list)
    """Names of the sources of ``data.train`` and ``data.eval`` whose rows it scores, as in ``[data.sources]``. Empty:
    all. Each source needs a function."""
    eval: bool = False
    """Use this function's score alone as ``eval/accuracy``. At most one function may set it; without it, the weighted
    sum is used."""
    options: dict[str, object] = Field(default_factory=dict)
    """Options of the function, as in ``reward.options``."""
    signature: Signature = "auto"
    """Signature of a user function, as in ``reward.signature``."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Time limit in seconds. null uses ``reward.timeout_seconds``."""
    num_workers: int | None = Field(None, ge=1)
    """Number of processes. null uses ``reward.num_workers``."""
    async_concurrency: int | None = Field(None, ge=1)
    """Concurrent samples of an async function. null uses ``reward.async_concurrency``."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        _check_function(self.function, self.signature, self.options)
        return self


class RewardConfig(Section):
    """Rewards (``docs/rewards.md``)."""

    function: str = "math"
    """Reward function. ``math`` compares the last boxed answer or ``Answer:`` line. ``reasoning_gym`` uses the task's
    own scorer. ``words`` is the fraction of the label's words in the response. ``code`` runs tests. ``reward_model``
    and ``judge`` call a server. ``none`` is 0, if a teacher is the only signal. Or a user function, ``module:function``
    or ``path/to/file.py:function``. ``""`` uses ``[reward.functions.NAME]``."""
    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """Several named functions instead of one. The reward is the weighted sum of their scores."""
    agent_parts: dict[str, float] = Field(default_factory=dict)
    """Weights of the parts in which ``[agent]`` gives its rewards, by name (docs/agents.md). The reward is their
    weighted sum. Empty: an agent gives one number."""
    options: dict[str, object] = Field(default_factory=dict)
    """Options of a built-in function, or keyword arguments of a user function."""
    signature: Signature = "auto"
    """Signature of a user function. ``auto`` recognizes it by the names of its parameters."""
    partial_credit: bool = False
    """Keep scores of reasoning-gym below 1. false sets them to 0."""
    format: float = Field(0.0, ge=0, lt=1)
    """Bonus for a response with exactly one complete answer and at most one thinking block, which must be closed."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Number of tokens before ``rollout.max_new_tokens`` over which the length penalty grows linearly (DAPO). 0
    disables the penalty."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Penalty subtracted from the score of a response of ``rollout.max_new_tokens`` tokens."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty in the reward: it subtracts the KL of the rollout policy to the reference, token by
    token (PPO, RLHF). 0 disables it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of this KL. k1 = log mu - log ref is unbiased. k2 is half its square. k3 = ref / mu - 1 + k1 is
    unbiased and never negative."""
    timeout_seconds: float = Field(10.0, gt=0)
    """Time limit in seconds for one sample, or for one call of a batch function. A slower call is stopped and counts as
    failed."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Largest fraction of a step's rewards that may fail, over all ranks. A step with more stops the run after a save.
    A single failed sample never does. 1 allows all failures but those of every sample."""
    num_workers: int = Field(1, ge=1)
    """Processes per rank that compute slow rewards."""
    async_concurrency: int = Field(64, ge=1)
    """Maximum number of concurrent samples of an async function in one process."""

    @property
    def eval_score_name(self) -> str:
        """``accuracy`` if each held-out response is right or wrong, otherwise ``score``."""
        is_exact = self.function == "math" or (self.function == "reasoning_gym" and not self.partial_credit)
        return "accuracy" if is_exact else "score"

    @property
    def part_weights(self) -> dict[str, float]:
        """Weights of a reward's summands by name: the parts that an agent gives, or else functions and shaping."""
        if self.agent_parts:
            return {name: weight for name, weight in self.agent_parts.items() if weight}
        functions = {name: each.weight for name, each in self.functions.items() if each.weight}
        weights = functions or {"score": 1.0}
        if self.format:
            weights["format"] = 1.0
        if self.overlong_buffer_tokens:
            weights["overlong"] = 1.0
        return weights

    @model_validator(mode="before")
    @classmethod
    def _one_or_several_functions(cls, values: object) -> object:
        if not isinstance(values, dict) or not values.get("functions"):
            return values
        if values.get("function", "") != "":
            raise ValueError(
                f"function = {values['function']!r} and [reward.functions.NAME] exclude each other; move the "
                "function to a section [reward.functions.NAME], or remove those sections"
            )
        for key in ("signature", "options", "partial_credit"):
            default = cls.model_fields[key].get_default(call_default_factory=True)
            if values.get(key, default) != default:
                raise ValueError(
                    f"reward.{key} belongs to reward.function, but [reward.functions.NAME] is set: move it to the "
                    "section of one function (partial_credit belongs in its options)"
                )
        return {**values, "function": ""}

    @field_validator("agent_parts")
    @classmethod
    def _parts_are_valid(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name == "score":
                raise ValueError(
                    f"the part {name!r} becomes part of a metric name; use only letters, digits, '_', '.' and '-', and "
                    "not 'score'"
                )
        if value and not any(value.values()):
            raise ValueError("every weight is 0, so that there is no reward; set at least one weight")
        return value

    @field_validator("functions")
    @classmethod
    def _names_and_weights_are_valid(cls, value: dict[str, RewardFunctionConfig]) -> dict[str, RewardFunctionConfig]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in _RESERVED_NAMES:
                raise ValueError(
                    f"the function name {name!r} becomes part of a metric name; use only letters, digits, '_', '.' "
                    f"and '-', and none of {', '.join(_RESERVED_NAMES)}"
                )
        if len(marked := [name for name, each in value.items() if each.eval]) > 1:
            raise ValueError(
                f"eval = true is set for {' and '.join(marked)}, but eval/accuracy is one score; set it "
                "for one function only"
            )
        if value and not any(each.weight for each in value.values()):
            raise ValueError("every weight is 0, so that there is no reward; set at least one weight")
        return value

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.function == "" and not self.functions:
            raise ValueError("function = '' without [reward.functions.NAME]; name a function")
        if self.partial_credit and self.function != "reasoning_gym":
            raise ValueError(
                f"partial_credit = true applies to function = 'reasoning_gym', but function = {self.function!r}; "
                "remove it"
            )
        _check_function(self.function, self.signature, self.options)
        if self.overlong_penalty != 1 and not self.overlong_buffer_tokens:
            raise ValueError(
                f"overlong_penalty = {self.overlong_penalty} has no effect without overlong_buffer_tokens; set it to "
                "the number of tokens over which the penalty grows"
            )
        return self
