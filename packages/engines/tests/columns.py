"""Columns of tokens as the records hold them, and records compared to the bit: their == compares identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def ids(values: Iterable[int]) -> Tensor:
    """Tokens."""
    return torch.tensor(list(values), dtype=torch.int32)


def logs(values: Iterable[float]) -> Tensor:
    """Log-probabilities."""
    return torch.tensor(list(values), dtype=torch.float32)


def mask(values: Iterable[bool]) -> Tensor:
    """Which tokens were sampled."""
    return torch.tensor(list(values), dtype=torch.bool)


def same(result: Any, expected: Any) -> bool:
    """Return True if all fields of two records, also nested ones, are equal; tensors in type, shape and bits."""
    if isinstance(result, Tensor) and isinstance(expected, Tensor):
        # NumPy has no bfloat16; a float32 holds each of its values.
        arrays = [(t.float() if t.dtype == torch.bfloat16 else t).detach().numpy() for t in (result, expected)]
        return result.dtype == expected.dtype and same(*arrays)
    if isinstance(result, np.ndarray) and isinstance(expected, np.ndarray):
        kinds = [(array.dtype, array.shape) for array in (result, expected)]
        return kinds[0] == kinds[1] and result.tobytes() == expected.tobytes()
    if isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        alike = isinstance(result, tuple) == isinstance(expected, tuple) and len(result) == len(expected)
        return alike and all(map(same, result, expected))
    if isinstance(result, Mapping) and isinstance(expected, Mapping):
        return result.keys() == expected.keys() and all(same(value, expected[key]) for key, value in result.items())
    if is_dataclass(result) and is_dataclass(expected):
        names = [field.name for field in fields(result)]
        return type(result) is type(expected) and all(same(getattr(result, n), getattr(expected, n)) for n in names)
    if any(isinstance(value, (Tensor, np.ndarray)) for value in (result, expected)):
        return False
    return bool(result == expected) or (result != result and expected != expected)
