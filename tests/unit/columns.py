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


def same(found: Any, expected: Any) -> bool:
    """Whether all fields of two records are equal, those of records in them too; tensors in type, shape and bits."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        # NumPy has no bfloat16; a float32 holds each of its values.
        arrays = [(t.float() if t.dtype == torch.bfloat16 else t).detach().numpy() for t in (found, expected)]
        return found.dtype == expected.dtype and same(*arrays)
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        kinds = [(array.dtype, array.shape) for array in (found, expected)]
        return kinds[0] == kinds[1] and found.tobytes() == expected.tobytes()
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        alike = isinstance(found, tuple) == isinstance(expected, tuple) and len(found) == len(expected)
        return alike and all(map(same, found, expected))
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(value, expected[key]) for key, value in found.items())
    if is_dataclass(found) and is_dataclass(expected):
        names = [field.name for field in fields(found)]
        return type(found) is type(expected) and all(same(getattr(found, n), getattr(expected, n)) for n in names)
    if any(isinstance(value, (Tensor, np.ndarray)) for value in (found, expected)):
        return False
    return bool(found == expected) or (found != found and expected != expected)
