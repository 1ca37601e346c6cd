"""The function that ``reward.function`` names, ready to be called in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.errors import FunctionError, RewardError
from megatron_dppo.functions import load_function
from megatron_dppo.rewards import math as math_reward_module
from megatron_dppo.rewards import reasoning_gym
from megatron_dppo.rewards.signatures import Form, RunFacts, is_async, recognise
from megatron_dppo.rewards.words import words_reward

BUILT_IN = ("math", "reasoning_gym", "words")


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function by name, as it is sent to a worker process."""

    name: str
    """``math``, ``reasoning_gym``, ``words``, ``module:function`` or ``path/to/file.py:function``."""
    signature: str = "auto"
    partial_credit: bool = False
    facts: RunFacts = field(default_factory=RunFacts)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function and how to call it."""

    function: Callable[..., Any]
    form: Form
    is_async: bool


def load(spec: FunctionSpec) -> RewardFunction:
    """Import the function and recognise its signature.

    Raises:
        RewardError: the name has another form, the import fails, it is not callable, or its signature is not known.
    """
    if spec.name == "math":
        function: Callable[..., Any] = math_reward_module.math_reward
    elif spec.name == "words":
        function = words_reward
    elif spec.name == "reasoning_gym":
        function = reasoning_gym.make_reward(partial_credit=spec.partial_credit)
    else:
        try:
            function = load_function(spec.name, "reward.function", "'math', 'reasoning_gym', 'words', ")
        except FunctionError as error:
            raise RewardError(str(error)) from error
    if spec.name in BUILT_IN:
        spec = replace(spec, signature="megatron_dppo")
    return RewardFunction(function, recognise(spec.name, function, spec.signature), is_async(function))
