"""Reading JSON of which nothing is known: what comes out has its type, or the field is named that has not."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pybase64
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.types import FinishReason, SamplingMask, VersionSpan

_SHOWN = 80


_HIGHEST = 2**31 - 1


class Fields:
    """Fields of the answer to one request.

    Every method takes a value and the name of its field, and raises ``ContractViolation`` where the value is anything
    else than the method's result.

    Args:
        url: what was called.
        request_id: of the request.
        lost: what may have happened when a field is missing, for the message.
    """

    def __init__(self, url: str, request_id: str, lost: str) -> None:
        self._url, self._request_id, self._lost = url, request_id, lost

    def refuse(self, field: str, detail: str) -> NoReturn:
        """The field is wrong."""
        raise ContractViolation(self._url, self._request_id, field, detail)

    def junk(self, value: Any, expected: str) -> NoReturn:
        """The whole answer is something else: not what the server said, perhaps, but what stands before it."""
        raise ServerError(self._url, f"expected {expected}, got {shown(value)}", 200)

    def present(self, parent: Mapping[str, Any], key: str, field: str, cause: str | None = None) -> Any:
        """The value of a key that has one."""
        value = parent.get(key)
        if value is None:
            self.refuse(field, f"is missing: {cause or self._lost}")
        return value

    def mapping(self, value: Any, field: str) -> dict[str, Any]:
        """A JSON object."""
        if not isinstance(value, dict):
            self.refuse(field, f"is {shown(value)}, expected an object")
        return value

    def rows(self, value: Any, field: str) -> list[Any]:
        """A JSON array."""
        if not isinstance(value, list):
            self.refuse(field, f"is {shown(value)}, expected an array")
        return value

    def text(self, value: Any, field: str) -> str:
        """A string."""
        if not isinstance(value, str):
            self.refuse(field, f"is {shown(value)}, expected a string")
        return value

    def finish(self, value: Any, field: str) -> FinishReason:
        """Why a response ended, by the name that both engines give it."""
        if not isinstance(value, str) or value not in tuple(FinishReason):
            *others, last = FinishReason
            self.refuse(field, f"is {shown(value)}, expected {', '.join(others)} or {last}")
        return FinishReason(value)

    def integer(self, value: Any, field: str) -> int:
        """A count or an id: 0 to 2^31 - 1."""
        return self.integers([value], field)[0]

    def integers(self, values: Any, field: str) -> list[int]:
        """Ids or counts: each 0 to 2^31 - 1; true, false and 1.0 are none."""
        values = self.rows(values, field)
        if not set(map(type, values)) <= {int} or (values and not 0 <= min(values) <= max(values) <= _HIGHEST):
            place = next(i for i, v in enumerate(values) if type(v) is not int or not 0 <= v <= _HIGHEST)
            self.refuse(f"{field}[{place}]", f"is {shown(values[place])}, expected an integer of 0 to {_HIGHEST}")
        return values

    def numbers(self, values: Any, field: str) -> list[float]:
        """Numbers of any size, NaN and the infinities among them."""
        values = self.rows(values, field)
        types = set(map(type, values))
        if types == {float}:
            return values
        if not types <= {int, float}:
            place = next(i for i, v in enumerate(values) if type(v) not in (int, float))
            self.refuse(f"{field}[{place}]", f"is {shown(values[place])}, expected a number")
        try:
            return [float(value) for value in values]
        except OverflowError:
            self.refuse(field, "holds an integer above the largest number")

    def ids(self, values: Any, field: str) -> NDArray[np.int32]:
        """``integers`` as an array."""
        return np.array(self.integers(values, field), dtype=np.int32)

    def sets(self, value: Any, length: int, field: str) -> SamplingMask:
        """An array of ids for each of ``length`` tokens."""
        rows = self.rows(value, field)
        if len(rows) != length:
            self.refuse(field, f"has {len(rows)} sets, expected {length}, one a token")
        found = [self.ids(row, f"{field}[{place}]") for place, row in enumerate(rows)]
        counts = torch.tensor([len(ids) for ids in found], dtype=torch.int32)
        return SamplingMask(torch.from_numpy(np.concatenate(found)), counts)

    def floats(self, values: Any, field: str) -> NDArray[np.float32]:
        """``numbers`` as an array; what is too large for a float32 becomes infinite."""
        with np.errstate(over="ignore"):
            return np.array(self.numbers(values, field), dtype=np.float32)

    def columns(self, rows: Any, width: int, field: str) -> list[list[Any]]:
        """The first ``width`` columns of an array of arrays."""
        rows = self.rows(rows, field)
        if not set(map(type, rows)) <= {list} or not all(len(row) >= width for row in rows):
            place = next(i for i, row in enumerate(rows) if type(row) is not list or len(row) < width)
            self.refuse(f"{field}[{place}]", f"is {shown(rows[place])}, expected an array of {width} or more")
        return [[row[i] for row in rows] for i in range(width)]

    def decoded(self, value: Any, field: str) -> bytes:
        """What base64 stands for."""
        try:
            return pybase64.b64decode(self.text(value, field), validate=True)
        except (binascii.Error, ValueError) as error:
            self.refuse(field, f"is not base64: {error}")

    def packed(self, value: Any, dtype: str, field: str) -> NDArray[Any]:
        """Base64 of numbers of a NumPy dtype."""
        content = self.decoded(value, field)
        if len(content) % np.dtype(dtype).itemsize:
            self.refuse(field, f"holds {len(content)} bytes, which are not {dtype} numbers")
        return np.frombuffer(content, dtype=dtype)

    def spans(self, value: Any, length: int, field: str) -> tuple[VersionSpan, ...]:
        """Spans ``{version, start, end}`` that cover a response; empty ones are left out."""
        result = []
        for i, span in enumerate(self.rows(value, field)):
            span = self.mapping(span, f"{field}[{i}]")
            edges = [self.present(span, key, f"{field}[{i}].{key}") for key in ("start", "end")]
            start, end = self.integers(edges, f"{field}[{i}]")
            if end > start:
                result.append(VersionSpan(policy_version(span.get("version")), start, end))
        edges = [0, *(span.end for span in result)]
        if [span.start for span in result] != edges[:-1] or edges[-1] != length:
            self.refuse(field, f"is {shown(value)}, which does not cover the {length} tokens of the response")
        return tuple(result)


def policy_version(name: Any) -> int:
    """The policy version of a name; -1 for ``default`` and everything else that is not one of ours."""
    return int(name) if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10 else -1


def whole(value: Any, url: str, name: str) -> int:
    """A size or an id that a server says of itself, 0 to 2^31 - 1.

    Raises:
        ServerError: it is something else.
    """
    if type(value) is not int or not 0 <= value <= _HIGHEST:
        raise ServerError(url, f"{name} is {shown(value)}, expected an integer of 0 to {_HIGHEST}")
    return value


def part(value: Any, url: str, name: str) -> dict[str, Any]:
    """An object in an answer.

    Raises:
        ServerError: it is something else.
    """
    if not isinstance(value, dict):
        raise ServerError(url, f"{name} is {shown(value)}, expected an object")
    return value


def tokens_of(answer: Any, url: str) -> tuple[int, ...] | None:
    """The ids in the answer to ``/tokenize``; None = there are none.

    Raises:
        ServerError: they are something else.
    """
    tokens = part(answer, url, "the answer").get("tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list):
        raise ServerError(url, f"tokens is {shown(tokens)}, expected an array")
    return tuple(whole(token, url, "a token") for token in tokens)


def shown(value: Any) -> str:
    """A value for a message, cut."""
    try:
        text = repr(value)
    except RecursionError:
        text = "something nested very deeply"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


INCOMPLETE = "incomplete"
"""The version while an update is under way. If the trainer dies now, nobody takes the weights for good ones."""


def version_name(version: int) -> str:
    """A policy version as servers keep it."""
    return str(version)


def never_below(values: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Log-probabilities of -inf where they are at or below what an engine writes for that."""
    return np.where(values <= limit, np.float32("-inf"), values)


def with_sampled(
    ids: NDArray[np.int32], values: NDArray[np.float32], tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    """Put the sampled token in a last slot where it is not one of the K: both [R, K+1] (see ``Completion``).

    Args:
        ids: [R, K] the most probable tokens.
        values: [R, K] their log-probabilities.
        tokens: [R] the sampled ones.
        logprobs: [R] theirs.
    """
    sampled = tokens[:, None]
    outside = ~(ids == sampled).any(1, keepdims=True)
    last_id = np.where(outside, sampled, np.int32(-1))
    last_value = np.where(outside, logprobs[:, None], np.float32(0))
    return (
        torch.from_numpy(np.concatenate([ids, last_id], 1)),
        torch.from_numpy(np.concatenate([values, last_value], 1)),
    )


def keep_allowed(
    sampling_mask: SamplingMask, ids: NDArray[np.int32], values: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The most probable tokens [R, K] without those that a filter cut; -1 and 0 stand behind the others."""
    is_kept = np.zeros(ids.shape, dtype=np.bool_)
    for row, own in enumerate(np.split(sampling_mask.ids.numpy(), sampling_mask.counts.numpy().cumsum()[:-1])):
        is_kept[row] = np.isin(ids[row], own)
    order = np.argsort(~is_kept, axis=1, kind="stable")
    ids, values = np.where(is_kept, ids, np.int32(-1)), np.where(is_kept, values, np.float32(0))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def checked_success(answer: Any, url: str) -> Mapping[str, Any]:
    """The answer of a control call.

    Raises:
        ServerError: the server answers 200 and says that it failed.
    """
    if not isinstance(answer, dict):
        return {}
    if answer.get("success") is False:
        raise ServerError(url, str(answer.get("message") or "the server says that it failed"))
    return answer
