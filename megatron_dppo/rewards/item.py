"""What is scored and what comes back: items, results, shaping, and the forms of slime's rewards."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

from megatron_dppo.rewards.math import is_well_formed


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One completion, with everything that a reward function of any signature may ask for."""

    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    completion: str
    """The response without special tokens."""
    label: str
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data row and ``finish_reason`` (``stop`` or ``length``)."""
    token_ids: Sequence[int] = ()
    """[R] the response's tokens, the end-of-sequence token included."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The prompt's chat messages; None when the row has a plain string."""

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off at its longest length."""
        return self.metadata.get("finish_reason") == "length"


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A reward, or why there is none."""

    reward: float
    """What training uses: the score with its shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """``score`` (without shaping), the function's own parts and the shaping's; empty for a plain number unshaped."""
    failed: bool = False
    error: str = ""
    eval_score: float | None = None
    """What an evaluation counts, where one of several functions is marked for it; None = the unshaped score."""


def overlong_punishment(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, from 0 to -1 (arXiv 2503.14476, equation 13).

    Args:
        length: tokens of the response.
        longest: the hard limit L_max.
        buffer: L_cache; within the last ``buffer`` tokens the punishment grows linearly.
    """
    return min(0.0, max(-1.0, (longest - buffer - length) / buffer))


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The shaping of ``[reward]``; each part that is on is logged under its name."""

    max_new_tokens: int = 0
    format: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0

    def parts(self, item: RewardItem) -> dict[str, float]:
        """The addends for one response, by name; empty when all shaping is off."""
        result = {}
        if self.format:
            good = not item.truncated and is_well_formed(item.completion)
            result["format"] = self.format if good else 0.0
        if self.overlong_buffer_tokens:
            share = overlong_punishment(len(item.token_ids), self.max_new_tokens, self.overlong_buffer_tokens)
            result["overlong"] = self.overlong_penalty * share
        return result


class SlimeArgs:
    """The first argument of slime's functions; only what has a meaning here is set."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} does not exist here; slime's args have {sorted(self.__dict__)} in this run")


@dataclass
class SlimeSample:
    """The fields of slime's ``Sample`` (slime/utils/types.py) that a reward function reads."""

    class Status(Enum):
        """Why the response ended."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str
    response: str
    label: str
    metadata: dict[str, Any]
    response_length: int
    """tokens"""
    status: Status


_SCORES = ("score", "reward")


_LARGEST = (2 - 2**-23) * 2.0**127
"""of float32, in which advantages are computed"""


_TEXT_LENGTH = 2000


def read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """The score and the named parts (none for a plain number).

    Parts that are not numbers are left out: verl's functions return the extracted answer beside the score.

    Raises:
        TypeError, ValueError: no number, not finite in float32, or a table without exactly one of ``score`` and
            ``reward``.
    """
    if not isinstance(value, Mapping):
        return _finite("the reward", value), {}
    present = [key for key in _SCORES if key in value]
    if len(present) != 1:
        raise ValueError(f"a reward table needs exactly one of 'score' and 'reward', got {sorted(map(_name, value))}")
    parts = {
        _name(name): _finite(f"the part {name!r}", part)
        for name, part in value.items()
        if name not in _SCORES and _is_number(part)
    }
    return _finite(f"the {present[0]}", value[present[0]]), parts


def read_batch(values: Any, count: int) -> list[Any]:
    """The values of a batch, one a sample.

    Raises:
        TypeError, ValueError: not a list, or of another length.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"a function for batches must return a list of rewards, got {shown(values)}")
    result = list(islice(values, count + 1))  # an iterator may be endless
    if len(result) != count:
        more = "more than " if len(result) > count else ""
        raise ValueError(f"{more}{min(len(result), count)} rewards for a batch of {count} samples")
    return result


def error_text(error: BaseException) -> str:
    """An error in one line or a few, whatever its own methods do."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = f"{type(error).__name__} (whose text cannot be made)"
    return _plain(text)[:_TEXT_LENGTH]


def shown(value: Any) -> str:
    """A short ``repr``, whatever the object's own does."""
    try:
        return _plain(reprlib.repr(value))
    except BaseException:
        return f"a {type(value).__name__}"


def _name(value: Any) -> str:
    return _plain(str(value))


def _plain(text: str) -> str:
    """Text of the built-in type, without what UTF-8 cannot hold."""
    return str.encode(text, "utf-8", "replace").decode()


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | bytearray | Mapping | list | tuple):
        return False
    try:
        float(value)
    except OverflowError:  # a number, and too large
        return True
    except (TypeError, ValueError):
        return False
    return True


def _finite(what: str, value: Any) -> float:
    # float() would read a number out of text, and drop the imaginary part of NumPy's.
    is_complex = isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    if value is None or is_complex or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{what} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {shown(value)}")
    if abs(number) > _LARGEST:
        raise ValueError(f"{what} must fit into float32 (up to {_LARGEST:.7g}), got {number:g}")
    return number
