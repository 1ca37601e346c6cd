"""A user's own loss or mask: what it declares to need, and the one copy of it that a process has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from megatron_dppo.errors import FunctionError
from megatron_dppo.functions import check_arguments, content_hash, has_parameter, is_function_name, load_function

_F = TypeVar("_F", bound=Callable[..., Any])
_ATTRIBUTE = "function_needs"
BuiltInAdvantage = Literal["mean", "std", "leave_one_out", "none"]


@dataclass(frozen=True, kw_only=True)
class FunctionNeeds:
    """What a user's loss or mask needs beside pi, mu and the advantage of each token."""

    topk: bool = False
    """the Top-K fields of ``LossInputs``, with ``loss.topk`` ids"""
    topk_gradient: bool = False
    """``topk_logprobs`` with a gradient; only a loss"""
    topk_other_square: bool = False
    """the sum of pi^2 outside the Top-K set"""
    entropy_gradient: bool = False
    """``entropy`` with a gradient (without one it is always there); only a loss"""
    recomputed: bool = False
    """``recomputed_logprobs``, recomputed by the trainer at the rollout's weights"""
    reference: bool = False
    """``reference_logprobs``"""
    sequences: bool = False
    """whole sequences, told apart by ``sequence_ids``: a token's result depends on other tokens of its sequence"""
    zero_advantage: bool = True
    """a token whose advantage is 0 may have a gradient; False = never, so that such rows are skipped; only a loss"""

    def __post_init__(self) -> None:
        if not self.topk and (self.topk_gradient or self.topk_other_square):
            raise ValueError("topk_gradient and topk_other_square need topk = True, too")

    @property
    def inputs(self) -> frozenset[str]:
        """Fields of LossInputs that other losses may do without."""
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
        return frozenset(name for name, needed in fields.items() if needed)


def needs(**what: bool) -> Callable[[_F], _F]:
    """Declare what a user's loss or mask needs; the keywords are the fields of ``FunctionNeeds``.

    Example:
        >>> @needs(topk=True)
        ... def loss(inputs):
        ...     return -inputs.advantages * inputs.logprobs
        >>> loss.function_needs.topk
        True

    Raises:
        TypeError: an unknown keyword.
        ValueError: they contradict each other.
    """
    declared = FunctionNeeds(**what)

    def mark(function: _F) -> _F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return mark


@dataclass(frozen=True)
class UserFunction:
    """A loaded function."""

    name: str
    setting: str
    """the key that named it"""
    needs: FunctionNeeds
    content_hash: str
    """SHA-256 of its file; empty for a module's function"""
    function: Callable[..., Any] = field(compare=False)


_LOADED: dict[tuple[str, str], UserFunction] = {}


def get_user_function(name: str, setting: str) -> UserFunction:
    """The function as ``load_user_function`` has loaded it; loaded now in a process that has not.

    Raises:
        FunctionError: see ``load_function``.
    """
    return _LOADED.get((name, setting)) or _load(name, setting, content_hash(name))


def reload_if_changed(name: str, setting: str) -> UserFunction:
    """Return the loaded function, or load it again where its file has changed.

    Raises:
        FunctionError: see ``load_function``.
    """
    try:
        content = content_hash(name)
    except OSError:
        content = ""
    found = _LOADED.get((name, setting))
    return _load(name, setting, content) if found is None or found.content_hash != content else found


def load_user_function(
    name: str, setting: str, options: Mapping[str, Any], takes: Sequence[str] = ("inputs",), offers: Sequence[str] = ()
) -> UserFunction:
    """Load a function, or give the loaded one where its file has not changed.

    Args:
        name: of the function.
        setting: what named it.
        options: what it gets by name.
        takes: its positional arguments.
        offers: what it also gets by name where it has such a parameter.

    Raises:
        FunctionError: it cannot be imported, cannot be called with these arguments, or declares needs of another type.
    """
    found = reload_if_changed(name, setting)
    extra = dict.fromkeys(offer for offer in offers if has_parameter(found.function, offer))
    check_arguments(found.function, name, setting, takes, {**extra, **options})
    return found


def load_user_mask(name: str, options: Mapping[str, Any]) -> None:
    """Load the function in ``loss.mask``.

    Raises:
        FunctionError: see ``load_user_function``; or it declares what only a loss can need.
    """
    needs = load_user_function(name, "loss.mask", options).needs
    if needs.topk_gradient or needs.entropy_gradient or not needs.zero_advantage:
        raise FunctionError(
            f"loss.mask = {name!r} declares topk_gradient, entropy_gradient or zero_advantage: a mask has no gradient, "
            "so they would do nothing; take them out"
        )


def _load(name: str, setting: str, content: str) -> UserFunction:
    function = load_function(name, setting)
    declared = getattr(function, _ATTRIBUTE, FunctionNeeds())
    if not isinstance(declared, FunctionNeeds):
        raise FunctionError(
            f"{setting} = {name!r} has {_ATTRIBUTE} = {declared!r}; declare its needs by the decorator "
            "megatron_dppo.losses.needs(topk=True, ...)"
        )
    _LOADED[(name, setting)] = UserFunction(name, setting, declared, content, function)
    return _LOADED[(name, setting)]


def check_advantage(name: str, options: Mapping[str, Any]) -> None:
    """Whether ``train.advantage`` is one that there is, and whether its options are of use.

    Raises:
        ValueError: it is not.
    """
    if is_function_name(name):
        try:
            load_user_function(name, "train.advantage", options, ("rewards", "valid"), offers=("groups",))
        except FunctionError as error:
            raise ValueError(str(error)) from error
    elif name not in get_args(BuiltInAdvantage):
        known = ", ".join(repr(mode) for mode in get_args(BuiltInAdvantage))
        raise ValueError(f"advantage = {name!r}: expected {known} or 'path/to/file.py:function'")
    elif options:
        raise ValueError(
            f"advantage_options = {dict(options)} has no effect on advantage = {name!r}; remove it, or name a function "
            "of your own"
        )
