"""Encoding of Protocol Buffers: fields by number, without a schema compiler.

Source: protobuf.dev/programming-guides/encoding. Only the wire types of the Tinker API are known: varint, 64 bits and
length-delimited.
"""

import struct
from collections.abc import Iterator

_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_MAX_VARINT_BYTES = 10
_SIGN = 1 << 63
_WRAP = 1 << 64

Value = int | float | bytes


class FieldReader:
    """Reader of the fields of a message and of the messages in it.

    All of them together have at most ``max_fields``: an empty field takes two bytes to send.
    """

    def __init__(self, max_fields: int) -> None:
        self._max_fields = max_fields
        self._num_fields = 0

    def read(self, message: memoryview) -> Iterator[tuple[int, Value | memoryview]]:
        """Yield the number and value of each field, in the order of the message; ``ValueError`` if it is malformed.

        An int is a varint, a float has 64 bits, and a ``memoryview`` is text, bytes or a message. It is not copied.
        """
        position = 0
        while position < len(message):
            self._num_fields += 1
            if self._num_fields > self._max_fields:
                raise ValueError(f"it has more than {self._max_fields} fields; send fewer data a request")
            tag, position = read_varint(message, position)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == _VARINT:
                value, position = read_varint(message, position)
                yield number, value - _WRAP if value & _SIGN else value
                continue
            if wire_type == _FIXED64:
                size = 8
            elif wire_type == _BYTES:
                size, position = read_varint(message, position)
            else:
                raise ValueError(f"field {number} has the wire type {wire_type}, expected 0, 1 or 2")
            if size > len(message) - position:
                raise ValueError(
                    f"field {number} has {size} bytes, and the message ends after {len(message) - position}"
                )
            content = message[position : position + size]
            position += size
            yield number, struct.unpack("<d", content)[0] if wire_type == _FIXED64 else content


def write_field(number: int, value: Value) -> bytes:
    """Return one field: an int as varint, a float in 64 bits, bytes with their length."""
    if isinstance(value, bytes):
        return _write_varint(number << 3 | _BYTES) + _write_varint(len(value)) + value
    if isinstance(value, float):
        return _write_varint(number << 3 | _FIXED64) + struct.pack("<d", value)
    return _write_varint(number << 3 | _VARINT) + _write_varint(value % _WRAP)


def write_message(*fields: tuple[int, Value]) -> bytes:
    """Return a message of fields, each a number and a value."""
    return b"".join(write_field(number, value) for number, value in fields)


def read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return the number at a position of a message, and the position after it."""
    value = 0
    for index, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value % _WRAP, position + index + 1
    raise ValueError(f"the number at byte {position} is cut, or longer than {_MAX_VARINT_BYTES} bytes")


def _write_varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
