"""Messages of the Tinker API that travel as Protocol Buffers: training data, losses and samples.

The field numbers are those of the SDK's schema, version 0.38.0 (``tinker_public.proto``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.protobuf import FieldReader, read_varint, write_message

_DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32}
"""Numbers of the enumeration ``DType`` that a client sends."""
_FLOAT32 = 1
_STOP_REASONS = {"stop": 0, "length": 1}
_MAX_DATA = 4096
"""Largest number of data in a request. The SDK sends at most 1024."""
MAX_FIELDS = 1 << 18
"""Largest number of fields in a request: 64 for each datum."""
_MAX_DIMENSIONS = 8
_CHUNK_TYPES = {2: "an image", 3: "audio"}


@dataclass(frozen=True)
class Datum:
    """One sequence with the inputs of its loss."""

    tokens: Tensor
    """Input tokens. Int64, shape [T]."""
    loss_inputs: Mapping[str, Tensor]
    """Tensors of the loss by name, in the dtype that was sent."""


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """Body of ``/api/v1/forward_backward``."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class SampledSequence:
    """One sampled response."""

    tokens: Tensor
    """Int32, shape [R]."""
    logprobs: Tensor
    """Float32, shape [R]."""
    stop_reason: str
    """``stop`` or ``length``."""


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Return a request for gradients or for a forward pass."""
    values: dict[int, Any] = {}
    data: list[Datum] = []
    config: dict[str, float | str] = {}
    old_config: dict[str, float | str] = {}
    fields = FieldReader(MAX_FIELDS)
    try:
        for number, value in fields.read(memoryview(body)):
            if number == 3:
                if len(data) == _MAX_DATA:
                    raise ValueError(f"it has more than {_MAX_DATA} data; send fewer a request")
                data.append(_read_datum(value, fields))
            elif number == 5:
                old_config.update([_read_entry(value, _read_number, fields)])
            elif number == 7:
                config.update([_read_entry(value, _read_config_value, fields)])
            elif number in (1, 2, 4, 6):
                values[number] = value
            else:
                raise ValueError(f"field {number} of ForwardBackwardRequest is unknown")
        return ForwardBackwardRequest(
            model_id=_text(values.get(1, b"")),
            seq_id=int(values.get(2, 0)),
            data=tuple(data),
            loss_fn=_text(values.get(4, b"")),
            # An older SDK sends numbers alone, in the older field.
            loss_fn_config=config or old_config,
            forward_only=bool(values.get(6, 0)),
        )
    except (ValueError, TypeError) as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from error


def write_forward_output(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ``ForwardBackwardOutput`` with the log-probabilities of each datum, float32 [T]."""
    offsets = torch.tensor([0, *(4 * len(each) for each in logprobs)]).cumsum(0)
    data = b"".join(_raw(each, torch.float32) for each in logprobs)
    tensor = write_message((1, data), (2, _raw(offsets, torch.int64)), (3, _FLOAT32))
    record = write_message((2, write_message((1, b"logprobs"), (2, tensor))), (3, len(logprobs)))
    entries = [(3, write_message((1, name.encode()), (2, float(value)))) for name, value in metrics.items()]
    return write_message((1, b"ArrayRecord"), (2, record), *entries)


def write_samples(sequences: Sequence[SampledSequence], prompt_logprobs: Tensor | None) -> bytes:
    """Return a ``SampleResponse``; the prompt's log-probabilities [P] have NaN where there is none."""
    fields = [
        (
            1,
            write_message(
                (1, _STOP_REASONS[each.stop_reason]),
                (2, _raw(each.tokens, torch.int32)),
                (3, _raw(each.logprobs, torch.float32)),
            ),
        )
        for each in sequences
    ]
    if prompt_logprobs is not None:
        fields.append((2, _raw(prompt_logprobs, torch.float32)))
    return write_message(*fields)


def _read_datum(message: Any, fields: FieldReader) -> Datum:
    tokens: list[Tensor] = []
    inputs: dict[str, Tensor] = {}
    for number, value in fields.read(_message(message)):
        if number == 1:
            tokens.append(_read_chunk(value, fields))
        elif number == 2:
            inputs.update([_read_entry(value, _read_tensor, fields)])
        elif number not in (3, 4):
            raise ValueError(f"field {number} of Datum is unknown")
        # Fields 3 and 4 name the sampled sequences that the tokens come from. The losses here do not read them.
    return Datum(torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), inputs)


def _read_chunk(message: Any, fields: FieldReader) -> Tensor:
    for number, value in fields.read(_message(message)):
        if number in _CHUNK_TYPES:
            raise RequestError(f"the model input has {_CHUNK_TYPES[number]}; this server trains on text tokens alone")
        if number != 1:
            raise ValueError(f"field {number} of Chunk is unknown")
        for inner, content in fields.read(_message(value)):
            if inner == 1:
                return _from_bytes(content, torch.int32).long()
    return torch.zeros(0, dtype=torch.int64)


def _read_tensor(message: Any, fields: FieldReader) -> Tensor:
    parts: dict[int, Any] = {}
    shape: list[int] = []
    for number, value in fields.read(_message(message)):
        if number == 4:
            # Repeated numbers come packed in one field, or one by one.
            shape += [value] if isinstance(value, int) else _unpack_varints(value)
        else:
            parts[number] = value
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
    if 2 in parts:
        raise RequestError("a loss input is a sparse tensor, which needs several targets a position; send a dense one")
    if parts.get(3) not in _DTYPES:
        raise ValueError(f"a tensor has the DType {parts.get(3)}, expected one of {sorted(_DTYPES)}")
    tensor = _from_bytes(parts.get(1, b""), _DTYPES[parts[3]])
    if shape and (min(shape) < 0 or math.prod(shape) != len(tensor)):
        raise ValueError(f"a tensor has {len(tensor)} values, and the shape {shape[:4]}")
    return tensor.reshape(shape) if shape else tensor


def _read_number(value: Any, fields: FieldReader) -> float:
    del fields
    return float(value)


def _read_config_value(message: Any, fields: FieldReader) -> float | str:
    for number, value in fields.read(_message(message)):
        return float(value) if number == 1 and isinstance(value, float) else _text(value)
    return 0.0


def _read_entry(message: Any, read: Callable[[Any, FieldReader], Any], fields: FieldReader) -> tuple[str, Any]:
    parts: dict[int, Any] = dict(fields.read(_message(message)))
    missing = 0.0 if read is _read_number else memoryview(b"")
    return _text(parts.get(1, b"")), read(parts.get(2, missing), fields)


def _unpack_varints(content: Any) -> list[int]:
    message = _message(content)
    if len(message) > 10 * _MAX_DIMENSIONS:
        raise ValueError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
    values: list[int] = []
    position = 0
    while position < len(message):
        value, position = read_varint(message, position)
        values.append(value)
    return values


def _message(value: Any) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError(f"a field is a number, expected a message: {value!r:.40}")
    return value


def _text(value: Any) -> str:
    return bytes(value).decode()


def _from_bytes(content: Any, dtype: torch.dtype) -> Tensor:
    # A copy: the body is read-only, and torch warns of tensors in such memory.
    buffer = bytearray(content)
    if len(buffer) % dtype.itemsize:
        raise ValueError(f"{len(buffer)} bytes are no whole number of {dtype} values")
    return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.zeros(0, dtype=dtype)


def _raw(values: Tensor, dtype: torch.dtype) -> bytes:
    return values.detach().cpu().to(dtype).contiguous().numpy().tobytes()
