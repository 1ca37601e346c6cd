"""What a reward function may return: a number, or a table with ``score`` and named parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_SCORES = ("score", "reward")


def read_reward(value: Any) -> tuple[float, dict[str, float]]:
    """The score and the named parts (none for a plain number).

    Parts that are not numbers are left out: verl's functions return the extracted answer beside the score.

    Raises:
        TypeError, ValueError: no number, not finite, or a table without exactly one of ``score`` and ``reward``.
    """
    if not isinstance(value, Mapping):
        return _finite("the reward", value), {}
    present = [key for key in _SCORES if key in value]
    if len(present) != 1:
        raise ValueError(f"a reward table needs exactly one of 'score' and 'reward', got {sorted(map(str, value))}")
    parts = {
        str(name): _finite(f"the part {name!r}", part)
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
        raise TypeError(f"a function for batches must return a list of rewards, got {values!r}")
    result = list(values)
    if len(result) != count:
        raise ValueError(f"{len(result)} rewards for a batch of {count} samples")
    return result


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | bytearray | Mapping | list | tuple):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _finite(what: str, value: Any) -> float:
    # float() would read a number out of text.
    if value is None or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {number}")
    return number
