"""JSON over HTTP to one inference server, with a deadline on every call and retries only where they are safe."""

import asyncio
import contextlib
import io
import json
import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megatron_dppo_engines.errors import ConfigError, ServerError

_ATTEMPTS = 3
_FIRST_WAIT = 0.1
"""Seconds before the second attempt; each further wait is four times as long."""
_KEEP_ALIVE = 3.0
"""Seconds that an idle connection stays open. Less than the 5 of the servers' uvicorn, so that no request goes into a
connection that the server is about to close. Such a request must not be repeated, since it may be running."""
_MAX_DETAIL = 2000
"""Characters of a server's error text in an error message."""
_RETRY_STATUSES = (408, 425, 429)
"""HTTP statuses of a request that was not processed and may be sent again soon."""
MAX_RESPONSE_BYTES = 256 << 20
"""Largest response to a call without a limit of its own. The digests of all tensors of a large model take some MiB."""
_MAX_ERROR_BYTES = 1 << 20
"""Bytes of an error's response that are read; the rest is cut off."""
_ENCODINGS = ("gzip", "x-gzip", "deflate")
"""Compressions of a response that are read, and limited by their inflated size."""
_CHUNKED_BYTES = 1 << 20
"""Size above which a body is sent in chunks: one write of many megabytes would block the event loop."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds until a call fails, including the time to read the response."""

    connect: float = 5.0
    """Opening a connection."""
    alive: float = 10.0
    """Server information and aborts: calls that are cheap for the server, however busy it is."""
    silent: float = 1.0
    """The same calls to a server that did not respond the last time."""
    health: float = 30.0
    """Health check; SGLang's own takes up to 20 seconds."""
    control: float = 120.0
    """Pause, resume, checksum."""
    update: float = 900.0
    """One call that transfers weights."""
    generate: float = 3600.0
    """One complete response, including the time in the server's queue."""


class HttpClient:
    """Connections to one server. Belongs to the event loop that first uses it.

    A URL of another form than ``http://host:port`` raises ``ConfigError``. The key is sent as ``Authorization:
    Bearer``, and never part of an error message or a repr. More requests than ``connections`` wait within their
    deadline. Without ``keep_alive`` no connection is used again, for servers that close one after an error without an
    announcement.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connections: int = 1024,
        connect_timeout: float = 5.0,
        keep_alive: bool = True,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigError(f"server URL {url!r}: expected http://HOST:PORT without a path")
        if parts.username or parts.password:
            raise ConfigError(f"the URL of server {parts.hostname} holds a password; give it as the API key instead")
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections = connections
        self._connect_timeout = connect_timeout
        self._keep_alive = keep_alive
        self._session: aiohttp.ClientSession | None = None
        self._is_silent = False

    async def check(self, path: str, deadlines: Deadlines) -> object:
        """Return the response to a cheap GET. While the server is silent, calls fail sooner."""
        try:
            response = await self.get(path, timeout=deadlines.silent if self._is_silent else deadlines.alive)
        except ServerError as error:
            self._is_silent = error.status is None
            raise
        self._is_silent = False
        return response

    async def get(self, path: str, *, timeout: float) -> object:
        """Return the response to a GET; see ``post``."""
        return await self._call("GET", path, None, timeout, repeat=True)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout: float,
        repeat: bool = False,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> object:
        """Return the JSON of the response, its text if it is not JSON, or None if it is empty.

        ``timeout`` covers all attempts and the waits between them. ``repeat`` allows that the call runs twice on the
        server. Without it, a call is repeated only if no connection could be opened, so that it never reached the
        server. No more than ``max_bytes`` of the inflated response are read or kept in memory. Every failure is a
        ``ServerError``.
        """
        return await self._call("POST", path, {} if body is None else body, timeout, repeat, max_bytes)

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        timeout: float,
        repeat: bool,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> object:
        end = time.monotonic() + timeout
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        # Nothing has reached the server then, so a repetition is always safe.
        retried: tuple[type[Exception], ...] = (aiohttp.ClientConnectorError,)
        if repeat:
            retried = (*retried, aiohttp.ClientConnectionError)
        for attempt in range(_ATTEMPTS):
            is_last = attempt + 1 == _ATTEMPTS
            try:
                return await self._send(method, path, data, end - time.monotonic(), max_bytes)
            # Before TimeoutError, of which it is a subclass.
            except aiohttp.ConnectionTimeoutError:
                raise ServerError(self.url + path, f"no connection within {self._connect_timeout:g} seconds") from None
            except TimeoutError:
                raise ServerError(self.url + path, f"no response within {timeout:g} seconds") from None
            except ServerError as error:
                wait = max(_FIRST_WAIT * 4**attempt, error.retry_after or 0.0)
                is_late = wait >= end - time.monotonic()
                if not repeat or error.status not in _RETRY_STATUSES or is_last or is_late:
                    raise
                await asyncio.sleep(wait)
            except aiohttp.ClientError as error:
                wait = _FIRST_WAIT * 4**attempt
                if not isinstance(error, retried) or is_last or wait >= end - time.monotonic():
                    detail = str(error)[:_MAX_DETAIL] or type(error).__name__
                    raise ServerError(self.url + path, detail) from None
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, method: str, path: str, data: bytes | None, timeout: float, max_bytes: int) -> object:
        if timeout <= 0:
            raise TimeoutError
        payload = io.BytesIO(data) if data is not None and len(data) > _CHUNKED_BYTES else data
        async with self._open().request(
            method,
            self.url + path,
            data=payload,
            headers={"Content-Type": "application/json"} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout),
            # A redirect would send the API key to another host.
            allow_redirects=False,
        ) as response:
            if not 200 <= response.status < 300:
                content, _ = await read_limited(response, _MAX_ERROR_BYTES)
                retry_after = _parse_retry_after(response.headers.get("Retry-After"))
                raise ServerError(self.url + path, _error_detail(content), response.status, retry_after=retry_after)
            content, is_complete = await read_limited(response, max_bytes)
            if not is_complete:
                raise ServerError(
                    self.url + path,
                    f"the response has more than {max_bytes:,} bytes, the most that this call can need; the rest was "
                    "not read. Something that is no server of this run answers, or the server is broken",
                    response.status,
                )
            return decode_body(content)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            reuse: dict[str, Any] = {"keepalive_timeout": _KEEP_ALIVE} if self._keep_alive else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=self._connections, **reuse)
            headers = {"Accept-Encoding": "gzip, deflate", **self._headers}
            # Inflated here, where the size is limited: a megabyte of gzip can hold a gigabyte.
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)
        return self._session


async def read_limited(response: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """Return an inflated body of at most ``max_bytes``, and False if it is longer and was cut off.

    The session has no ``auto_decompress``. A compression that was not asked for, or is another than the header says,
    raises ``ServerError``.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    inflate = None
    if encoding in _ENCODINGS:
        # 32: a header of gzip or zlib is recognized by itself.
        inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    elif encoding != "identity":
        raise ServerError(
            str(response.url), f"expected a response without compression, got {encoding!r}", response.status
        )
    chunks: list[bytes] = []
    size = 0
    async for data in response.content.iter_any():
        try:
            # One byte beyond the limit shows that it is exceeded. Never 0, which would mean no limit.
            chunk = data if inflate is None else inflate.decompress(data, max_bytes + 1 - size)
        except zlib.error as error:
            raise ServerError(str(response.url), f"the response is no {encoding}: {error}", response.status) from None
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            return b"".join(chunks)[:max_bytes], False
    return b"".join(chunks), True


def decode_body(content: bytes) -> object:
    """Return the JSON of a response, its text if it is not JSON, or None if it is empty."""
    if not content:
        return None
    try:
        return orjson.loads(content)
    except ValueError:
        pass  # servers send NaN and infinities, which are no JSON but which the slower parser below reads
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # RecursionError: nested a thousand times
        return content.decode(errors="replace")


def _parse_retry_after(header: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header, which holds seconds or a date."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header)) if math.isfinite(float(header)) else None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _error_detail(content: bytes) -> str:
    """Return the server's error text, from any of the keys where FastAPI, SGLang and vLLM put it."""
    try:
        body = json.loads(content)
        for key in ("error", "message", "detail"):
            if isinstance(body, dict) and body.get(key):
                body = body[key]
        text = body if isinstance(body, str) else json.dumps(body)
    except (ValueError, RecursionError):
        text = content.decode(errors="replace")
    return text.strip()[:_MAX_DETAIL] or "no message"
