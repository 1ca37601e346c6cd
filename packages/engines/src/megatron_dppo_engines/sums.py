"""Sums over tokens or responses, added field by field."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self, TypeVar


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Base of records whose fields are all sums.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Pair(Sums):
        ...     left: float = 0.0
        ...     right: float = 0.0
        >>> Pair(left=1.0) + Pair(left=2.0, right=3.0)
        Pair(left=3.0, right=3.0)
    """

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


_KeyT = TypeVar("_KeyT")
_SumsT = TypeVar("_SumsT", bound=Sums)


def add_by_key(total: dict[_KeyT, _SumsT], part: Mapping[_KeyT, _SumsT]) -> None:
    """Add the sums of ``part`` to those of ``total`` that have the same key."""
    for key, sums in part.items():
        total[key] = total[key] + sums if key in total else sums
