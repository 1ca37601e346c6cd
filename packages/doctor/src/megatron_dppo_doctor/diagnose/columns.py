"""Typed reads of one row of a dump. Errors name location, column, value and fix."""

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

_LOGPROB_TOLERANCE = 1e-3
"""Largest log-probability above 0 that rounding may cause."""
_MAX_TOKEN_ID = 2**31
"""Upper bound of token ids: sampling masks store them as int32."""


@dataclass(frozen=True)
class DumpRow:
    """Row of a dump. Every method raises ``DataError`` for a value of another type or range."""

    location: str
    """File, and line or row, for error messages."""
    values: Mapping[str, Any]
    vocab_size: int | None = None
    """Vocabulary size of the model. None skips the check of ids."""

    @property
    def names(self) -> list[str]:
        """Sorted names of all columns."""
        return sorted(map(str, self.values))

    def has(self, name: str) -> bool:
        """Return True if the column exists and has a value."""
        return self.values.get(name) is not None

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of these columns that has a value, or None."""
        return next(filter(self.has, names), None)

    def error(self, text: str) -> DataError:
        """Return an error that names the row."""
        return DataError(f"{self.location}: {text}")

    def ids(self, name: str) -> list[int]:
        """Return token ids, at least one."""
        values = self._read_ids(name)
        if not values:
            raise self.error(f"column {name!r} is empty, expected one token id or more; leave such a response out")
        return values

    def mask(self, name: str, count: int) -> list[bool]:
        """Return a mask ``[count]``, True for tokens with a loss."""
        values = self._read_list(name, f"a list of {count} numbers 0 or 1, one for each response token", count)
        for i, value in enumerate(values):
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise self._value_error(
                    name, value, "0 or 1 (or false or true), 1 = the token trains", _entry_text(i, values)
                )
        return [bool(value) for value in values]

    def logprobs(self, name: str, sampled: Sequence[bool]) -> list[float]:
        """Return natural log-probabilities of the response tokens, 0 where ``sampled`` is False."""
        values = self._read_list(name, "a list of log-probabilities, one for each response token", len(sampled))
        for i, (value, trains) in enumerate(zip(values, sampled, strict=True)):
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise self._value_error(name, value, "a log-probability (a number)", _entry_text(i, values))
            if not trains:
                continue
            if value is None or not _is_finite(value):
                expected = "a finite log-probability. Give the token the loss mask 0, or leave the response out"
                raise self._value_error(name, value, expected, _entry_text(i, values))
            if value > _LOGPROB_TOLERANCE:
                expected = "a log-probability, at most 0: these look like probabilities. Write their natural logarithm"
                raise self._value_error(name, value, expected, _entry_text(i, values))
        return [float(value) if trains else 0.0 for value, trains in zip(values, sampled, strict=True)]

    def length(self, name: str, below: int) -> int:
        """Return an integer from 1 to ``below - 1``."""
        value = _to_python(self.values.get(name))
        if not _is_integer(value) or not 0 < value < below:
            expected = f"an integer above 0 and below {below}, the number of tokens of prompt and response together"
            raise self._value_error(name, value, expected)
        return int(value)

    def flag(self, name: str) -> bool:
        """Return a boolean, False without a value."""
        value = _to_python(self.values.get(name))
        if value is not None and (not isinstance(value, bool | int | float) or value not in (0, 1)):
            raise self._value_error(name, value, "true or false")
        return bool(value)

    def routes(self, name: str, tokens: int) -> Tensor:
        """Return integers ``[tokens, num_layers, top_k]``. A last row, which belongs to no label, is dropped."""
        expected = f"integers [{tokens}, layers, k], of each token but the last one the experts of each layer"
        try:
            values = np.asarray(self.values[name])
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self._value_error(
                name, self.values[name], f"{expected}, all lists of a level equally long"
            ) from error
        if values.dtype.kind not in "iu":
            raise self._value_error(name, self.values[name], f"{expected}; these are of type {values.dtype}")
        if values.ndim != 3 or len(values) not in (tokens, tokens + 1):
            raise self.error(f"column {name!r}: routed experts of shape {values.shape}; expected {expected}")
        # Types that torch does not support.
        if (values.dtype.kind == "u" and values.dtype.itemsize > 1) or not values.dtype.isnative:
            if values.size and int(values.max()) > np.iinfo(np.int64).max:
                raise self._value_error(name, int(values.max()), expected)
            values = values.astype(np.int64)
        return torch.as_tensor(values[:tokens])

    def sampling_mask(self, ids: str, offsets: str, response: Sequence[int], sampled: Sequence[bool]) -> SamplingMask:
        """Return the sampling masks of the response, from all ids in sequence and the offsets of the sets."""
        members = self._read_ids(ids)
        count, bounds = len(response), self._read_integers(offsets, "where a set begins")
        if len(bounds) != count + 1 or bounds[0] != 0 or bounds[-1] != len(members) or bounds != sorted(bounds):
            raise self.error(
                f"column {offsets!r} is {reprlib.repr(bounds)}; expected {count + 1} rising numbers from 0 to "
                f"{len(members)}, the start of each token's set in {ids!r} and the end of the last one"
            )
        for i, (token, trains) in enumerate(zip(response, sampled, strict=True)):
            mask = members[bounds[i] : bounds[i + 1]]
            if trains and mask and token not in mask:
                raise self.error(
                    f"column {ids!r}: the set of response token {i + 1} of {count} lacks that token, {token}, which "
                    "was drawn from it; the sets are those of other tokens, or moved by one"
                )
        return SamplingMask(torch.tensor(members).int(), torch.tensor(bounds).diff().int())

    def _read_ids(self, name: str) -> list[int]:
        values = self._read_integers(name, "a token id as the tokenizer gives it (a float type may have rounded it)")
        for i, value in enumerate(values):
            if value < 0:
                expected = "a token id, 0 or more. Leave padding out of the lists"
                raise self._value_error(name, value, expected, _entry_text(i, values))
            if value >= (self.vocab_size or _MAX_TOKEN_ID):
                known = "is too large" if self.vocab_size is None else f"but the model has {self.vocab_size} entries"
                raise self.error(
                    f"column {name!r}{_entry_text(i, values)} has token {reprlib.repr(value)}, {known}: another "
                    "tokenizer or model. Give by --model the weights that trained on these rollouts"
                )
        return values

    def _read_integers(self, name: str, description: str) -> list[int]:
        values = self._read_list(name, "a list of integers, those of one response")
        for i, value in enumerate(values):
            if not _is_integer(value):
                raise self._value_error(name, value, f"an integer, {description}", _entry_text(i, values))
        return values

    def _read_list(self, name: str, expected: str, count: int | None = None) -> list[Any]:
        raw = self.values.get(name)
        values = _to_python(raw)
        if not isinstance(values, list | tuple):
            raise self._value_error(name, raw, expected)
        if count is not None and len(values) != count:
            raise self.error(
                f"column {name!r} has {len(values)} entries for {count} response tokens; expected one for each"
            )
        return [_to_python(value) for value in values]

    def _value_error(self, name: str, value: Any, expected: str, entry: str = "") -> DataError:
        shown = "missing" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
        return self.error(f"column {name!r}{entry} is {shown}; expected {expected}")


def _entry_text(index: int, values: Sequence[Any]) -> str:
    return f", entry {index + 1} of {len(values)},"


def _to_python(value: Any) -> Any:
    """Convert tensors and arrays to Python numbers and lists. Return other values unchanged."""
    if not isinstance(value, Tensor | np.ndarray | np.generic):
        return value
    try:
        return value.tolist()
    except (TypeError, ValueError, RuntimeError):
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Return True if the value is finite in fp32, the precision of the ledger."""
    return not math.isnan(value) and abs(value) <= torch.finfo(torch.float32).max
