"""Typed reads of untrusted JSON; errors name the field."""

import binascii
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pybase64
import torch
from numpy.typing import NDArray

from megatron_dppo_engines.errors import ContractViolation, ServerError
from megatron_dppo_engines.responses import FinishReason, SamplingMask, VersionSpan

_MAX_SHOWN = 80
"""Characters of a wrong value in an error message."""
_MAX_INT = 2**31 - 1

INCOMPLETE = "incomplete"
"""Version during a weight update. If the trainer dies now, no client takes the weights for complete ones."""


class ResponseFields:
    """Reader for the fields of the response to one request.

    Each ``read_*`` method takes a value and the name of its field. It raises ``ContractViolation`` if the value does
    not have the type of the method's result. ``missing_cause`` is the likely cause of a missing field.
    """

    def __init__(self, url: str, request_id: str, missing_cause: str) -> None:
        self._url = url
        self._request_id = request_id
        self._missing_cause = missing_cause

    def reject(self, field: str, detail: str) -> NoReturn:
        """Raise ``ContractViolation`` for a field."""
        raise ContractViolation(self._url, self._request_id, field, detail)

    def reject_body(self, value: object, expected: str) -> NoReturn:
        """Raise ``ServerError`` for a body that is no response of this engine, perhaps one of a proxy before it."""
        raise ServerError(self._url, f"expected {expected}, got {shorten(value)}", 200)

    def require(self, parent: Mapping[str, Any], key: str, field: str, cause: str | None = None) -> Any:
        """Return the value of a key that must not be missing or null; ``cause`` replaces the usual one."""
        value = parent.get(key)
        if value is None:
            self.reject(field, f"is missing: {cause or self._missing_cause}")
        return value

    def read_object(self, value: object, field: str) -> dict[str, Any]:
        """Read a JSON object."""
        if not isinstance(value, dict):
            self.reject(field, f"is {shorten(value)}, expected an object")
        return value

    def read_array(self, value: object, field: str) -> list[Any]:
        """Read a JSON array."""
        if not isinstance(value, list):
            self.reject(field, f"is {shorten(value)}, expected an array")
        return value

    def read_string(self, value: object, field: str) -> str:
        """Read a string."""
        if not isinstance(value, str):
            self.reject(field, f"is {shorten(value)}, expected a string")
        return value

    def read_finish_reason(self, value: object, field: str) -> FinishReason:
        """Read a finish reason; both engines use the same names."""
        if not isinstance(value, str) or value not in tuple(FinishReason):
            *first_reasons, last_reason = FinishReason
            self.reject(field, f"is {shorten(value)}, expected {', '.join(first_reasons)} or {last_reason}")
        return FinishReason(value)

    def read_integer(self, value: object, field: str) -> int:
        """Read a count or an id from 0 to 2^31 - 1."""
        return self.read_integers([value], field)[0]

    def read_integers(self, value: object, field: str) -> list[int]:
        """Read an array of counts or ids from 0 to 2^31 - 1; true, false and 1.0 are rejected."""
        values = self.read_array(value, field)
        # By the exact type, because a bool is an instance of int too.
        if not set(map(type, values)) <= {int} or (values and not 0 <= min(values) <= max(values) <= _MAX_INT):
            index = next(i for i, v in enumerate(values) if type(v) is not int or not 0 <= v <= _MAX_INT)
            self.reject(f"{field}[{index}]", f"is {shorten(values[index])}, expected an integer of 0 to {_MAX_INT}")
        return values

    def read_numbers(self, value: object, field: str) -> list[float]:
        """Read an array of numbers of any size, including NaN and infinities."""
        values = self.read_array(value, field)
        types = set(map(type, values))
        # The usual case of thousands of numbers: no copy.
        if types == {float}:
            return values
        if not types <= {int, float}:
            index = next(i for i, v in enumerate(values) if type(v) not in (int, float))
            self.reject(f"{field}[{index}]", f"is {shorten(values[index])}, expected a number")
        try:
            return [float(value) for value in values]
        except OverflowError:
            self.reject(field, "holds an integer above the largest number")

    def read_ids(self, value: object, field: str) -> NDArray[np.int32]:
        """Read an array of ids as int32."""
        return np.array(self.read_integers(value, field), dtype=np.int32)

    def read_float32(self, value: object, field: str) -> NDArray[np.float32]:
        """Read an array of numbers as float32; numbers that are too large become infinite."""
        # The contract rejects infinite values, and names the token.
        with np.errstate(over="ignore"):
            return np.array(self.read_numbers(value, field), dtype=np.float32)

    def read_columns(self, value: object, width: int, field: str) -> list[list[Any]]:
        """Read the first ``width`` columns of an array of arrays."""
        rows = self.read_array(value, field)
        if not set(map(type, rows)) <= {list} or not all(len(row) >= width for row in rows):
            index = next(i for i, row in enumerate(rows) if type(row) is not list or len(row) < width)
            self.reject(f"{field}[{index}]", f"is {shorten(rows[index])}, expected an array of {width} or more")
        return [[row[i] for row in rows] for i in range(width)]

    def read_sampling_mask(self, value: object, length: int, field: str) -> SamplingMask:
        """Read the token ids that the sampling filters allow for each of ``length`` tokens."""
        rows = self.read_array(value, field)
        if len(rows) != length:
            self.reject(field, f"has {len(rows)} sets, expected {length}, one a token")
        allowed = [self.read_ids(row, f"{field}[{index}]") for index, row in enumerate(rows)]
        counts = torch.tensor([len(ids) for ids in allowed], dtype=torch.int32)
        return SamplingMask(torch.from_numpy(np.concatenate(allowed)), counts)

    def read_version_spans(self, value: object, length: int, field: str) -> tuple[VersionSpan, ...]:
        """Read spans ``{version, start, end}`` that cover a response of ``length`` tokens; empty spans are dropped."""
        spans = []
        for i, item in enumerate(self.read_array(value, field)):
            span = self.read_object(item, f"{field}[{i}]")
            edges = [self.require(span, key, f"{field}[{i}].{key}") for key in ("start", "end")]
            start, end = self.read_integers(edges, f"{field}[{i}]")
            if end > start:
                spans.append(VersionSpan(parse_policy_version(span.get("version")), start, end))
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != length:
            self.reject(field, f"is {shorten(value)}, which does not cover the {length} tokens of the response")
        return tuple(spans)

    def read_base64(self, value: object, field: str) -> bytes:
        """Decode a base64 string."""
        try:
            return pybase64.b64decode(self.read_string(value, field), validate=True)
        except (binascii.Error, ValueError) as error:
            self.reject(field, f"is not base64: {error}")

    def read_packed_array(self, value: object, dtype: str, field: str) -> NDArray[Any]:
        """Decode base64 of an array of a NumPy dtype."""
        content = self.read_base64(value, field)
        if len(content) % np.dtype(dtype).itemsize:
            self.reject(field, f"holds {len(content)} bytes, which are not {dtype} numbers")
        return np.frombuffer(content, dtype=dtype)


# Control calls: their errors are ``ServerError``, since no request is involved.


def parse_policy_version(name: object) -> int:
    """Return the policy version of a name; -1 for ``default`` and any name that this trainer does not give."""
    # Up to 9 digits, so that it fits into 31 bits.
    return int(name) if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10 else -1


def require_integer(value: object, url: str, field: str) -> int:
    """Return an integer from 0 to 2^31 - 1 in the response to a control call."""
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ServerError(url, f"{field} is {shorten(value)}, expected an integer of 0 to {_MAX_INT}")
    return value


def require_object(value: object, url: str, field: str = "the response") -> dict[str, Any]:
    """Return a JSON object in the response to a control call."""
    if not isinstance(value, dict):
        raise ServerError(url, f"{field} is {shorten(value)}, expected an object")
    return value


def require_success(response: object, url: str) -> Mapping[str, Any]:
    """Return the response to a control call; an empty mapping if it is no JSON object."""
    if not isinstance(response, dict):
        return {}
    if response.get("success") is False:
        raise ServerError(url, str(response.get("message") or "the server reports a failure without a message"))
    return response


def read_tokenize_response(response: object, url: str) -> tuple[int, ...] | None:
    """Return the ids in the response to ``/tokenize``; None if it has none."""
    tokens = require_object(response, url).get("tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list):
        raise ServerError(url, f"tokens is {shorten(tokens)}, expected an array")
    return tuple(require_integer(token, url, "a token") for token in tokens)


def shorten(value: object) -> str:
    """Return a value for an error message, cut to ``_MAX_SHOWN`` characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = "something nested very deeply"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
