"""What a reward function may return: a number, or a table with ``score`` and named parts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

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
