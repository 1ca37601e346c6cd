"""Messages between a trainer and its own processes: a small JSON object, and the bytes of columns as they are."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import orjson
import torch
from torch import Tensor

from megatron_dppo.types import as_bytes

_PREFIX = struct.Struct("<Q")
"""Length of the JSON, which says how long the columns are that follow."""


class Frames(asyncio.BufferedProtocol):
    """One end of a connection. What comes in is received into the memory where it stays.

    Args:
        received: called with each message and its columns.
        lost: called when the connection has ended.
    """

    def __init__(self, received: Callable[[dict[str, Any], dict[str, Tensor]], None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._transport: asyncio.Transport | None = None
        self._reader = self._read()
        self._buffer, self._filled = bytearray(next(self._reader)), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """By asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """By asyncio."""
        self._transport = None
        self._lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        """By asyncio: where the next bytes go."""
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """By asyncio: so many have come."""
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._buffer, self._filled = bytearray(self._reader.send(self._buffer)), 0

    def send(self, message: Mapping[str, Any], columns: Mapping[str, Tensor | None]) -> None:
        """Send a message; nothing where the connection has ended. A column that is None is left out."""
        if self._transport is None:
            return
        present = {name: column for name, column in columns.items() if column is not None}
        kinds = [[name, str(c.dtype).removeprefix("torch."), list(c.shape)] for name, c in present.items()]
        head = orjson.dumps({**message, "columns": kinds})
        contents = [memoryview(as_bytes(column).numpy()) for column in present.values()]
        self._transport.writelines([_PREFIX.pack(len(head)), head, *contents])

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _read(self) -> Generator[int, bytearray, None]:
        """Yields how many bytes come next, and is sent these."""
        while True:
            (size,) = _PREFIX.unpack((yield _PREFIX.size))
            message: dict[str, Any] = orjson.loads((yield size))
            columns = {}
            for name, dtype, shape in message.pop("columns"):
                kind: torch.dtype = getattr(torch, dtype)
                column = torch.empty(shape, dtype=kind)
                if size := column.nbytes:
                    # Memory of its own for each: one that is dropped or copied later does not keep the others.
                    column = torch.frombuffer((yield size), dtype=kind).view(shape)
                columns[name] = column
            self._received(message, columns)
