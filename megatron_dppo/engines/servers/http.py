"""JSON over HTTP to one inference server: a deadline on every call, repeats only where they are safe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megatron_dppo.errors import ConfigError, ServerError

_ATTEMPTS = 3
_FIRST_WAIT = 0.1
_KEEP_ALIVE = 3.0
"""Seconds that an idle connection is kept: less than the 5 of the servers' uvicorn, so that no request is sent into a
connection which the server is about to close. Such a request could not be repeated: nobody knows whether it runs."""
_LONGEST_DETAIL = 2000
_LATER = (408, 425, 429)
"""Statuses that say that nothing was done, and that it may be asked again soon."""
_LARGE = 1 << 20
"""Bytes above which a body is sent in parts: one write of many megabytes would hold the event loop."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds after which a call has failed, answer included."""

    connect: float = 5.0
    alive: float = 10.0
    """what a server says of itself, and stopping a request: calls that cost it nothing, however busy it is"""
    silent: float = 1.0
    """the same, for a server that the last time did not answer"""
    health: float = 30.0
    """SGLang's own health check takes up to 20 seconds"""
    control: float = 120.0
    """pause, resume, checksum"""
    update: float = 900.0
    """one call that moves weights"""
    generate: float = 3600.0
    """one whole response, the time in the server's queue included"""


class HttpClient:
    """Connections to one server. Belongs to the event loop that first uses it.

    Args:
        url: ``http://host:port``, without a path.
        api_key: sent as ``Authorization: Bearer``; in no message and no representation.
        connections: requests in flight; more wait for a free connection, within their deadline.
        connect_timeout: seconds to open a connection.
        keep_alive: use a connection again. A server may close one after an error without saying so in its answer.

    Raises:
        ConfigError: a URL of another form.
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
        self._connections, self._connect_timeout, self._keep_alive = connections, connect_timeout, keep_alive
        self._session: aiohttp.ClientSession | None = None
        self._silent = False

    async def check(self, path: str, deadlines: Deadlines) -> Any:
        """The answer to a GET that costs the server nothing. While it is silent, each call is given up sooner.

        Raises:
            ServerError: as ``get``.
        """
        try:
            answer = await self.get(path, timeout=deadlines.silent if self._silent else deadlines.alive)
        except ServerError as error:
            self._silent = error.status is None
            raise
        self._silent = False
        return answer

    async def get(self, path: str, *, timeout: float) -> Any:
        """The answer's JSON; see ``post``."""
        return await self._call("GET", path, None, timeout, repeat=True)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float, repeat: bool = False
    ) -> Any:
        """The answer's JSON; its text where it is not JSON, None where it is empty.

        Args:
            path: with a leading slash.
            body: sent as JSON.
            timeout: seconds for everything, waits between attempts included.
            repeat: the call may run twice on the server. Without it only a call that never reached the server, because
                no connection could be opened, is tried again.

        Raises:
            ServerError: no connection, no answer in time, or an answer that is not 2xx.
        """
        return await self._call("POST", path, {} if body is None else body, timeout, repeat)

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float, repeat: bool) -> Any:
        end = time.monotonic() + timeout
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        again: tuple[type[Exception], ...] = (aiohttp.ClientConnectorError,)
        if repeat:
            again = (*again, aiohttp.ClientConnectionError)
        for attempt in range(_ATTEMPTS):
            left, last = end - time.monotonic(), attempt + 1 == _ATTEMPTS
            try:
                return await self._once(method, path, data, left)
            except aiohttp.ConnectionTimeoutError:
                raise ServerError(self.url + path, f"no connection within {self._connect_timeout:g} seconds") from None
            except TimeoutError:
                raise ServerError(self.url + path, f"no answer within {timeout:g} seconds") from None
            except ServerError as error:
                wait = max(_FIRST_WAIT * 4**attempt, error.retry_after or 0.0)
                if not repeat or error.status not in _LATER or last or wait >= end - time.monotonic():
                    raise
                await asyncio.sleep(wait)
            except aiohttp.ClientError as error:
                wait = _FIRST_WAIT * 4**attempt
                if not isinstance(error, again) or last or wait >= end - time.monotonic():
                    words = str(error)[:_LONGEST_DETAIL] or type(error).__name__
                    raise ServerError(self.url + path, words) from None
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, path: str, data: bytes | None, timeout: float) -> Any:
        if timeout <= 0:
            raise TimeoutError
        payload = io.BytesIO(data) if data is not None and len(data) > _LARGE else data
        async with self._open().request(
            method,
            self.url + path,
            data=payload,
            headers={"Content-Type": "application/json"} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout),
            # A redirect would carry the key to another place.
            allow_redirects=False,
        ) as response:
            content = await response.read()
            if not 200 <= response.status < 300:
                wish = _seconds(response.headers.get("Retry-After"))
                raise ServerError(self.url + path, _detail(content), response.status, retry_after=wish)
            return decode_body(content)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            reuse: dict[str, Any] = {"keepalive_timeout": _KEEP_ALIVE} if self._keep_alive else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=self._connections, **reuse)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session


def decode_body(content: bytes) -> Any:
    """An answer's JSON; its text where it is not JSON, None where it is empty."""
    if not content:
        return None
    try:
        return orjson.loads(content)
    except ValueError:
        pass  # NaN and the infinities are no JSON, and servers send them
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # the second: nested a thousand times
        return content.decode(errors="replace")


def _seconds(header: str | None) -> float | None:
    """A Retry-After header: seconds, or a date."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header)) if math.isfinite(float(header)) else None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _detail(content: bytes) -> str:
    """The server's own words, wherever FastAPI, SGLang or vLLM put them."""
    try:
        body = json.loads(content)
        for key in ("error", "message", "detail"):
            if isinstance(body, dict) and body.get(key):
                body = body[key]
        text = body if isinstance(body, str) else json.dumps(body)
    except (ValueError, RecursionError):
        text = content.decode(errors="replace")
    return text.strip()[:_LONGEST_DETAIL] or "no message"
