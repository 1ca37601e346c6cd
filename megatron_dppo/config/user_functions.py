"""User-defined losses and masks: their declared inputs, and one loaded copy per process."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import check_arguments, content_hash, has_parameter, is_function_name, load_function

_F = TypeVar("_F", bound=Callable[..., object])
_ATTRIBUTE = "function_needs"
BuiltInAdvantage = Literal["mean", "std", "leave_one_out", "opo", "gdpo", "remax", "none"]


@dataclass(frozen=True, kw_only=True)
class FunctionNeeds:
    """Inputs that a user's loss or mask needs, in addition to pi, mu and the advantage of each token."""

    topk: bool = False
    """The Top-K fields of ``LossInputs``, with ``loss.topk`` ids."""
    topk_gradient: bool = False
    """``topk_logprobs`` with a gradient. Losses only."""
    topk_other_square: bool = False
    """The sum of pi^2 outside the Top-K set."""
    entropy_gradient: bool = False
    """``entropy`` with a gradient; without one it is always available. Losses only."""
    recomputed: bool = False
    """``recomputed_logprobs``, which the trainer recomputes at the rollout's weights."""
    reference: bool = False
    """``reference_logprobs``."""
    sequences: bool = False
    """Complete sequences, identified by ``sequence_ids``: a token's result depends on other tokens of its sequence."""
    zero_advantage: bool = True
    """True if a token with advantage 0 can have a gradient. False skips rows without an advantage. Losses only."""
    columns: tuple[str, ...] = ()
    """Further fields of ``LossInputs`` that engines return on request (docs/extending.md)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.topk and (self.topk_gradient or self.topk_other_square):
            raise ValueError("topk_gradient and topk_other_square also need topk = True; add it")

    @property
    def inputs(self) -> frozenset[str]:
        """Fields of LossInputs that other losses may not need."""
        fields = {
            "topk_logprobs": self.topk,
            "rollout_topk_logprobs": self.topk,
            "topk_valid": self.topk,
            "topk_other_square": self.topk_other_square,
            "recomputed_logprobs": self.recomputed,
            "reference_logprobs": self.reference,
            "entropy": self.entropy_gradient,
            "sequence_ids": self.sequences,
        }
        return frozenset(name for name, needed in fields.items() if needed).union(self.columns)


def needs(*, columns: Sequence[str] = (), **what: bool) -> Callable[[_F], _F]:
    """Declare the inputs of a user's loss or mask; the keywords are the fields of ``FunctionNeeds``.

    Example:
        >>> @needs(topk=True)
        ... def loss(inputs):
        ...     return -inputs.advantages * inputs.logprobs
        >>> loss.function_needs.topk
        True

    Raises:
        TypeError: A keyword is unknown.
        ValueError: Two keywords contradict each other.
    """
    declared = FunctionNeeds(columns=tuple(columns), **what)

    def mark(function: _F) -> _F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return mark


@dataclass(frozen=True)
class UserFunction:
    """A loaded user function."""

    name: str
    """``path/to/file.py:function`` or ``module:function``."""
    setting: str
    """Key that names the function, such as ``loss.mask``."""
    needs: FunctionNeeds
    """Declared inputs."""
    content_hash: str
    """SHA-256 of its file. Empty for a function of a module."""
    function: Callable[..., object] = field(compare=False)
    """The callable."""


_MAY_EXECUTE = ContextVar("may_execute", default=True)


@contextmanager
def functions_as_text() -> Iterator[None]:
    """Validate configurations without importing the functions that they name."""
    token = _MAY_EXECUTE.set(False)
    try:
        yield
    finally:
        _MAY_EXECUTE.reset(token)


def may_execute() -> bool:
    """Return True if validating a configuration imports the functions that it names."""
    return _MAY_EXECUTE.get()


def describe_user_function(name: str, setting: str) -> UserFunction:
    """Return a user function with its declared needs, read from its file. Calling it raises; nothing is imported."""

    def refuse(*_: object, **__: object) -> Any:
        raise FunctionError(
            f"{setting} = {name!r} was not imported: this command does not execute the functions of a configuration"
        )

    return UserFunction(name, setting, _declared_needs(name), "", refuse)


def _declared_needs(name: str) -> FunctionNeeds:
    """Return the needs that a decorator ``needs(...)`` with constants declares. The default if there is none."""
    file, _, function = name.rpartition(":")
    try:
        nodes = ast.parse(Path(file).read_bytes()).body if Path(file).is_file() else []
        calls = [
            call
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node.name == function
            for call in node.decorator_list
            if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "needs"
        ]
        return FunctionNeeds(
            **{key.arg: ast.literal_eval(key.value) for call in calls for key in call.keywords if key.arg}
        )
    except (OSError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return FunctionNeeds()


# One copy per process, so that state in a function's module survives between calls.
_LOADED: dict[tuple[str, str], UserFunction] = {}


def get_user_function(name: str, setting: str) -> UserFunction:
    """Return the function that ``load_user_function`` loaded; load it first in a new process."""
    return _LOADED.get((name, setting)) or _load(name, setting, content_hash(name))


def reload_if_changed(name: str, setting: str) -> UserFunction:
    """Return the loaded function, or load it again if its file has changed."""
    # A missing file gets an empty hash, so that loading it again reports the error.
    try:
        content = content_hash(name)
    except OSError:
        content = ""
    current = _LOADED.get((name, setting))
    if current is None or current.content_hash != content:
        return _load(name, setting, content)
    return current


def load_user_function(
    name: str,
    setting: str,
    options: Mapping[str, object],
    *,
    positional: Sequence[str] = ("inputs",),
    optional: Sequence[str] = (),
) -> UserFunction:
    """Return a user function, loaded again if its file has changed; it may lack parameters in ``optional``."""
    user_function = reload_if_changed(name, setting)
    extra = dict.fromkeys(key for key in optional if has_parameter(user_function.function, key))
    check_arguments(user_function.function, name, setting, positional, {**extra, **options})
    return user_function


def load_user_mask(name: str, options: Mapping[str, object]) -> None:
    """Load the function in ``loss.mask``."""
    needs = load_user_function(name, "loss.mask", options).needs
    if needs.topk_gradient or needs.entropy_gradient or not needs.zero_advantage:
        raise FunctionError(
            f"loss.mask = {name!r} declares topk_gradient, entropy_gradient or zero_advantage, which have no effect: "
            "a mask has no gradient. Remove them from its declaration"
        )


def _load(name: str, setting: str, content: str) -> UserFunction:
    function = load_function(name, setting)
    declared = getattr(function, _ATTRIBUTE, FunctionNeeds())
    if not isinstance(declared, FunctionNeeds):
        raise FunctionError(
            f"{setting} = {name!r} has {_ATTRIBUTE} = {declared!r}; declare its needs with the decorator "
            "megatron_dppo.losses.needs(topk=True, ...)"
        )
    _LOADED[(name, setting)] = UserFunction(name, setting, declared, content, function)
    return _LOADED[(name, setting)]


def check_advantage(name: str, options: Mapping[str, object]) -> None:
    """Check that ``train.advantage`` exists, loads if it is a user function, and uses its options."""
    if is_function_name(name):
        if not may_execute():
            return
        try:
            load_user_function(name, "train.advantage", options, positional=("rewards", "valid"), optional=("groups",))
        except FunctionError as error:
            raise ValueError(str(error)) from error
    elif name not in get_args(BuiltInAdvantage):
        known = ", ".join(repr(mode) for mode in get_args(BuiltInAdvantage))
        raise ValueError(f"advantage = {name!r}: expected {known} or 'path/to/file.py:function'")
    elif options:
        raise ValueError(
            f"advantage_options = {dict(options)} has no effect on advantage = {name!r}; remove it, or set advantage "
            "to a user function"
        )
