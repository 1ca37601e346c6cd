"""Messages between a trainer and its own processes: a small JSON object, followed by the raw bytes of columns."""

import asyncio
import struct
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import orjson
import torch
from torch import Tensor

from megatron_dppo_engines.responses import as_bytes

_PREFIX = struct.Struct("<Q")
"""Length of the JSON object, which holds the shapes of the columns that follow."""


class Frames(asyncio.BufferedProtocol):
    """One end of a connection. Columns are received into their final memory, without a copy."""

    def __init__(
        self, on_message: Callable[[dict[str, object], dict[str, Tensor]], None], on_close: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        self._reader = self._read()
        # Starts the generator; its first value is the size of a prefix.
        self._buffer = bytearray(next(self._reader))
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection; called by asyncio."""
        self._transport = None
        self._on_close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes; called by asyncio."""
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes and pass on a full buffer; called by asyncio."""
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._buffer = bytearray(self._reader.send(self._buffer))
            self._filled = 0

    def send(self, message: Mapping[str, object], columns: Mapping[str, Tensor | None]) -> None:
        """Send a message, unless the connection has ended. Columns that are None are left out."""
        if self._transport is None:
            return
        present = {name: column for name, column in columns.items() if column is not None}
        headers = [[name, str(c.dtype).removeprefix("torch."), list(c.shape)] for name, c in present.items()]
        head = orjson.dumps({**message, "columns": headers})
        contents = [memoryview(as_bytes(column).numpy()) for column in present.values()]
        self._transport.writelines([_PREFIX.pack(len(head)), head, *contents])

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _read(self) -> Generator[int, bytearray, None]:
        """Yield the number of bytes to receive next; the generator is sent these bytes."""
        while True:
            (head_size,) = _PREFIX.unpack((yield _PREFIX.size))
            message: dict[str, Any] = orjson.loads((yield head_size))
            columns = {}
            for name, dtype_name, shape in message.pop("columns"):
                dtype: torch.dtype = getattr(torch, dtype_name)
                column = torch.empty(shape, dtype=dtype)
                # asyncio rejects an empty buffer.
                if column_size := column.nbytes:
                    # Separate memory for each column, so that one that lives longer does not keep the others alive.
                    column = torch.frombuffer((yield column_size), dtype=dtype).view(shape)
                columns[name] = column
            self._on_message(message, columns)
