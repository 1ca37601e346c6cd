"""The function that ``reward.function`` names, ready to be called in a worker."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_dppo.errors import RewardError
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
        function = load_function(spec.name)
    if spec.name in BUILT_IN:
        spec = replace(spec, signature="megatron_dppo")
    return RewardFunction(function, recognise(spec.name, function, spec.signature), is_async(function))


def load_function(name: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function of ``module:function`` or ``path/to/file.py:function``.

    Args:
        name: of the function.
        setting: what named it, for error messages.

    Raises:
        RewardError: see ``load``.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        built_in = "'math', 'reasoning_gym', 'words', " if setting == "reward.function" else ""
        raise RewardError(
            f"{setting} = {name!r}; expected {built_in}'module:function' or 'path/to/file.py:function', e.g. "
            "'my_functions:one'"
        )
    is_file = module_name.endswith(".py")
    try:
        module = _load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (Exception, SystemExit) as error:
        fix = "The path is relative to the configuration or to the working directory" if is_file else _ON_PATH
        raise RewardError(f"{setting} = {name!r} cannot be imported: {type(error).__name__}: {error}. {fix}") from error
    if not callable(function):
        raise RewardError(f"{setting} = {name!r} is not callable, but {type(function).__name__}")
    return function


_ON_PATH = "The module must be on PYTHONPATH or in the working directory"


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    # Named by its whole path: two files may have the same last name.
    name = f"user_file_{zlib.crc32(str(path).encode()):08x}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
