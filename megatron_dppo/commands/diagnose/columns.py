"""One row of a dump: each column is read as what it has to be, or refused with its place, value and remedy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.errors import DataError
from megatron_dppo.types import SamplingMask

_ABOVE_ZERO = 1e-3
"""How far above 0 rounding may put the log-probability of a certain token"""
_MOST_IDS = 2**31
"""Ids are below it in every model; sampling masks hold them in int32"""


@dataclass(frozen=True)
class DumpRow:
    """What stands in one row. Every method raises ``DataError`` for a value that is not what it says."""

    place: str
    """file, and line or row, for the messages"""
    values: Mapping[str, Any]
    """by column"""
    vocab_size: int | None = None
    """of the model; None = not known, so that ids are compared with no vocabulary"""

    @property
    def names(self) -> list[str]:
        """Of all columns, sorted."""
        return sorted(map(str, self.values))

    def has(self, name: str) -> bool:
        """Whether there is such a column with a value."""
        return self.values.get(name) is not None

    def first(self, names: Sequence[str]) -> str | None:
        """The first of these columns that has a value."""
        return next(filter(self.has, names), None)

    def error(self, text: str) -> DataError:
        """To be raised: the place with a text."""
        return DataError(f"{self.place}: {text}")

    def ids(self, name: str) -> list[int]:
        """Token ids, at least one."""
        found = self._ids(name)
        if not found:
            raise self.error(f"column {name!r} is empty, expected one token id or more; leave such a response out")
        return found

    def mask(self, name: str, count: int) -> list[bool]:
        """[count] True on the tokens that train."""
        found = self._list(name, f"a list of {count} numbers 0 or 1, one for each response token", count)
        for i, value in enumerate(found):
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise self._refused(name, value, "0 or 1 (or false or true), 1 = the token trains", _entry(i, found))
        return [bool(value) for value in found]

    def logprobs(self, name: str, sampled: Sequence[bool]) -> list[float]:
        """Natural log-probabilities, one for each response token; 0 where ``sampled`` is False."""
        found = self._list(name, "a list of log-probabilities, one for each response token", len(sampled))
        for i, (value, trains) in enumerate(zip(found, sampled, strict=True)):
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise self._refused(name, value, "a log-probability (a number)", _entry(i, found))
            if not trains:
                continue
            if value is None or not _is_finite(value):
                expected = "a finite log-probability. Give the token the loss mask 0, or leave the response out"
                raise self._refused(name, value, expected, _entry(i, found))
            if value > _ABOVE_ZERO:
                expected = "a log-probability, at most 0: these look like probabilities. Write their natural logarithm"
                raise self._refused(name, value, expected, _entry(i, found))
        return [float(value) if trains else 0.0 for value, trains in zip(found, sampled, strict=True)]

    def length(self, name: str, below: int) -> int:
        """A whole number from 1 to ``below - 1``."""
        value = _plain(self.values.get(name))
        if not _is_integer(value) or not 0 < value < below:
            expected = f"an integer above 0 and below {below}, the number of tokens of prompt and response together"
            raise self._refused(name, value, expected)
        return int(value)

    def flag(self, name: str) -> bool:
        """True or False; False without a value."""
        value = _plain(self.values.get(name))
        if value is not None and (not isinstance(value, bool | int | float) or value not in (0, 1)):
            raise self._refused(name, value, "true or false")
        return bool(value)

    def routes(self, name: str, tokens: int) -> Tensor:
        """``[tokens, L, k]`` integers as they stand there; a last row, which no label has, is left out."""
        expected = f"integers [{tokens}, layers, k], of each token but the last one the experts of each layer"
        try:
            found = np.asarray(self.values[name])
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self._refused(name, self.values[name], f"{expected}, all lists of a level equally long") from error
        if found.dtype.kind not in "iu":
            raise self._refused(name, self.values[name], f"{expected}; these are of type {found.dtype}")
        if found.ndim != 3 or len(found) not in (tokens, tokens + 1):
            raise self.error(f"column {name!r}: routed experts of shape {found.shape}; expected {expected}")
        if (found.dtype.kind == "u" and found.dtype.itemsize > 1) or not found.dtype.isnative:  # nothing for torch
            if found.size and int(found.max()) > np.iinfo(np.int64).max:
                raise self._refused(name, int(found.max()), expected)
            found = found.astype(np.int64)
        return torch.as_tensor(found[:tokens])

    def sampling_mask(self, ids: str, offsets: str, response: Sequence[int], sampled: Sequence[bool]) -> SamplingMask:
        """The sets of the response's tokens: all ids end to end, and where each set begins and the last one ends."""
        members = self._ids(ids)
        count, bounds = len(response), self._integers(offsets, "where a set begins")
        if len(bounds) != count + 1 or bounds[0] != 0 or bounds[-1] != len(members) or bounds != sorted(bounds):
            raise self.error(
                f"column {offsets!r} is {reprlib.repr(bounds)}; expected {count + 1} rising numbers from 0 to "
                f"{len(members)}, the start of each token's set in {ids!r} and the end of the last one"
            )
        for i, (token, trains) in enumerate(zip(response, sampled, strict=True)):
            own = members[bounds[i] : bounds[i + 1]]
            if trains and own and token not in own:
                raise self.error(
                    f"column {ids!r}: the set of response token {i + 1} of {count} lacks that token, {token}, which "
                    "was drawn from it; the sets are those of other tokens, or moved by one"
                )
        return SamplingMask(torch.tensor(members).int(), torch.tensor(bounds).diff().int())

    def _ids(self, name: str) -> list[int]:
        found = self._integers(name, "a token id as the tokenizer gives it (a float type may have rounded it)")
        for i, value in enumerate(found):
            if value < 0:
                expected = "a token id, 0 or more. Leave padding out of the lists"
                raise self._refused(name, value, expected, _entry(i, found))
            if value >= (self.vocab_size or _MOST_IDS):
                known = "is too large" if self.vocab_size is None else f"but the model has {self.vocab_size} entries"
                raise self.error(
                    f"column {name!r}{_entry(i, found)} has token {reprlib.repr(value)}, {known}: another tokenizer or "
                    "model. Give by --model the weights that trained on these rollouts"
                )
        return found

    def _integers(self, name: str, what: str) -> list[int]:
        found = self._list(name, "a list of integers, those of one response")
        for i, value in enumerate(found):
            if not _is_integer(value):
                raise self._refused(name, value, f"an integer, {what}", _entry(i, found))
        return found

    def _list(self, name: str, expected: str, count: int | None = None) -> list[Any]:
        values = self.values.get(name)
        found = _plain(values)
        if not isinstance(found, list | tuple):
            raise self._refused(name, values, expected)
        if count is not None and len(found) != count:
            raise self.error(
                f"column {name!r} has {len(found)} entries for {count} response tokens; expected one for each"
            )
        return [_plain(value) for value in found]

    def _refused(self, name: str, value: Any, expected: str, entry: str = "") -> DataError:
        shown = "missing" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
        return self.error(f"column {name!r}{entry} is {shown}; expected {expected}")


def _entry(index: int, values: Sequence[Any]) -> str:
    return f", entry {index + 1} of {len(values)},"


def _plain(value: Any) -> Any:
    """Python's numbers and lists of a tensor or array; anything else, and what has no such form, as it is."""
    if not isinstance(value, Tensor | np.ndarray | np.generic):
        return value
    try:
        return value.tolist()
    except (TypeError, ValueError, RuntimeError):
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Also as fp32, in which the ledger's numbers are kept."""
    return not math.isnan(value) and abs(value) <= torch.finfo(torch.float32).max
