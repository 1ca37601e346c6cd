"""Connections of the endpoint: a budget of file descriptors in which calls with a key come first."""

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from megatron_dppo.files import raise_file_limit

_MAX_CONNECTIONS = 4096
_GRACE_SECONDS = 1.0
"""Time without a call after which a connection may be closed for another one."""
_RETRY_SECONDS = 0.02


class ConnectionLimit:
    """Accepts a server's connections and keeps their number within a limit.

    Beyond the limit a new connection replaces one on which no call with a key is processed: the oldest that never had a
    key, or else the oldest of the episode that has the most. Until there is one, new connections wait in the queue of
    the kernel, where they take no file descriptor.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self.max_connections = max_connections
        self._busy: set[RequestHandler] = set()
        """Connections on which a call with a key is processed."""
        self._idle_since: dict[RequestHandler, float] = {}
        """Time at which a connection was opened, or at which its last call with a key ended."""
        self._owners: dict[RequestHandler, Hashable] = {}
        """Owner of the key that a connection had last: an episode."""

    async def accept(self, listener: socket.socket, make_protocol: Callable[[], RequestHandler]) -> None:
        """Accept connections until the task is canceled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self.make_room(time.monotonic()):
                await asyncio.sleep(_RETRY_SECONDS)
            try:
                accepted, _ = await loop.sock_accept(listener)
                _, protocol = await loop.connect_accepted_socket(make_protocol, accepted)
            except OSError:
                # The client is gone, or other parts of the process use all file descriptors.
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._idle_since[protocol] = time.monotonic()

    def make_room(self, now: float) -> bool:
        """Return True if a connection can be accepted; close another one for it if that is necessary."""
        # A connection that is being closed has no transport.
        connections = [each for each in self._server.connections if each.transport is not None]
        if len(connections) < self.max_connections:
            return True
        # Nothing reports a connection that closes, so closed ones are forgotten here.
        self._idle_since = {each: self._idle_since.get(each, now) for each in connections}
        self._owners = {each: self._owners[each] for each in connections if each in self._owners}
        num_owned = Counter(self._owners.values())

        def rank(connection: RequestHandler) -> float:
            owner = self._owners.get(connection)
            return math.inf if owner is None else num_owned[owner]

        limit = now - _GRACE_SECONDS
        idle = [each for each in connections if each not in self._busy and self._idle_since[each] < limit]
        if not idle:
            return False
        # Of equal ones, ``max`` returns the first, and connections are in the order in which they were opened.
        max(idle, key=rank).force_close()
        return True

    @contextmanager
    def processing(self, request: web.Request, owner: Hashable) -> Iterator[None]:
        """Keep the connection of a call with an owner's key open."""
        protocol = request.protocol
        self._busy.add(protocol)
        self._owners[protocol] = owner
        try:
            yield
        finally:
            self._busy.discard(protocol)
            self._idle_since[protocol] = time.monotonic()


def reserve_descriptors() -> int:
    """Return how many connections the endpoint may hold: at most half of the file descriptors of the process.

    Every episode that waits for the policy holds a connection, so the limit of the process is raised first.
    """
    return min(_MAX_CONNECTIONS, raise_file_limit() // 2)
