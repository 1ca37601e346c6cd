"""Connections of the endpoint: a budget of file descriptors in which calls with a key come first."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from megatron_dppo.engines.agents.request_bodies import CallError

_MAX_CONNECTIONS = 4096
_MAX_DESCRIPTORS = 65536


class ConnectionLimit:
    """Factory of a server's connections, which keeps their number within a limit.

    A connection beyond the limit replaces the oldest one on which no call with a key is processed: first of those that
    never had a key, then of those between two calls. If there is none, it is refused with status 503.

    Args:
        server: makes and counts the connections.
        max_connections: maximum number of open connections.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max_connections = max_connections
        self._busy: set[RequestHandler] = set()
        """Connections on which a call with a key is processed."""
        self._with_key: set[RequestHandler] = set()
        """Connections that had such a call."""

    def __call__(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""
        # A connection that is being closed has no transport.
        connections = [each for each in self._server.connections if each.transport is not None]
        self._with_key.intersection_update(connections)
        if len(connections) >= self._max_connections:
            idle = [each for each in connections if each not in self._busy]
            if not idle:
                return _Refusal(self._max_connections)
            # Of equal keys, ``min`` returns the first, and connections are in the order in which they were opened.
            min(idle, key=lambda each: each in self._with_key).force_close()
        return self._server()

    @contextmanager
    def processing(self, request: web.Request) -> Iterator[None]:
        """Keep the connection of a call with a key open."""
        protocol = request.protocol
        self._busy.add(protocol)
        self._with_key.add(protocol)
        try:
            yield
        finally:
            self._busy.discard(protocol)


class _Refusal(asyncio.Protocol):
    """Connection that is answered and closed before anything is read."""

    def __init__(self, max_connections: int) -> None:
        message = f"all {max_connections} connections wait for the policy; set agent.max_running, or raise ulimit -n"
        self._error = CallError(message, 503, "too_many_connections")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the error and close the connection."""
        assert isinstance(transport, asyncio.WriteTransport)
        body = json.dumps(self._error.body).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


def reserve_descriptors() -> int:
    """Return how many connections the endpoint may hold: at most half of the file descriptors of the process.

    The soft limit, often 1024, is raised towards the hard one first: every episode that waits for the policy holds a
    connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, soft // 2)
