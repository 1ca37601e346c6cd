"""HTTP server on which everything before a valid key is limited: connections, headers and time."""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import HttpVersion11, web

from megatron_dppo_agents.connections import ConnectionLimit, reserve_descriptors
from megatron_dppo_agents.loopback_network import LoopbackNetwork

IDLE_SECONDS = 60.0
"""Time until a request's headers must be complete, and for which a connection stays open between two calls."""
LINGER_SECONDS = 2.0
"""Time for which the rest of a rejected body is read and dropped, so that the client reads the error."""
_MAX_HEADERS = 64
_MAX_HEADER_BYTES = 2048
_READ_BUFFER_BYTES = 32768
"""Bytes of a body that a connection buffers before the handler reads them."""

_logger = logging.getLogger(__name__)
# aiohttp logs a traceback for each malformed request, and anybody can send those.
_logger.disabled = True


class _Protocol(web.RequestHandler):
    """Protocol of one connection, whose errors have the form of the API also if no handler was reached."""

    def __init__(self, server: web.Server, error_body: Callable[[str], object]) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            # No access log: it would contain nothing that a run needs.
            access_log=None,
            logger=_logger,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_BUFFER_BYTES,
            # aiohttp would inflate a body before its key is known.
            auto_decompress=False,
        )
        self._error_body = error_body

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See ``RequestHandler``, which has plain text and HTML."""
        super().handle_error(request, status, exc, message)
        reason = " ".join((message or type(exc).__name__).split())
        problem = "is no valid HTTP" if status == HTTPStatus.BAD_REQUEST else "failed"
        answer = web.json_response(self._error_body(f"the request {problem}: {reason:.200}"), status=status)
        answer.force_close()
        return answer


async def expect_later(request: web.Request) -> None:
    """Send no ``100 Continue``, as the ``expect_handler`` of a route: ``ask_for_body`` does it behind the key."""


async def ask_for_body(request: web.Request) -> None:
    """Send the ``100 Continue`` that a client may wait for before it sends the body.

    Any other ``Expect`` raises ``HTTPExpectationFailed``.
    """
    expected = request.headers.get("Expect", "")
    if not expected or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text=f"the header Expect = {expected!r:.80}, expected 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # aiohttp sends no error behind the first byte of a response.
    request.writer.output_size = 0


class LimitedServer:
    """Listening HTTP server. ``start`` and ``stop`` belong to one event loop. Port 0 takes a free one.

    ``error_body`` gives the JSON of the message of an error, for requests that reach no handler.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int = 0,
        network: LoopbackNetwork | None = None,
        *,
        error_body: Callable[[str], object],
    ) -> None:
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        self._error_body = error_body
        self._address = (host, port)
        self._network = network
        self._connections: ConnectionLimit | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server, without a path."""
        assert self._listener is not None
        host = self._address[0]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> ConnectionLimit:
        """Limit of the connections."""
        assert self._connections is not None
        return self._connections

    async def start(self) -> None:
        """Listen and accept connections; ``OSError`` if the address cannot be used."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._connections = ConnectionLimit(server, reserve_descriptors())
        # aiohttp's own sites accept without a limit; ``ConnectionLimit`` accepts instead.
        if self._network is None:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._listener = socket.create_server(self._address, family=family, backlog=socket.SOMAXCONN)
        else:
            self._listener = self._network.listen(self._address)
        self._listener.setblocking(False)
        accepting = self._connections.accept(self._listener, lambda: _Protocol(server, self._error_body))
        self._accepting = asyncio.create_task(accepting)

    async def stop(self) -> None:
        """Close all connections and stop listening."""
        assert self._accepting is not None and self._listener is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        await self._runner.cleanup()


def digest_key(key: str) -> bytes:
    """Return the digest by which keys are compared, so that the time of it tells nothing about a key."""
    # aiohttp decodes headers with surrogateescape, so that a key may hold any bytes.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
