"""Network between our HTTP client and the simulated servers, in place of an ``aiohttp.ClientSession``."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.faults.simulation.broadcast import Broadcasts
from tests.faults.simulation.faults import RETRY_AFTER, STATUSES, Fault
from tests.faults.simulation.server import DONE, SimServer
from tests.faults.simulation.watch import Watch

JUNK = (b"null", b'"ok"', b"[]", b"{", b"<html>gateway</html>", b"", b"17", b'{"meta_info": {}}', b'{"success": false}')

_SLOW = ("/generate", "/init_weights_update_group", "/update_weights_from_distributed")
"""Calls that are not answered at once."""
_SHORT = {id(DONE): json.dumps(DONE).encode()}


class Life:
    """One process of the trainer; what a dead one still does reaches nobody."""

    def __init__(self, watch: Watch) -> None:
        self.dead = False
        self.watch = watch


class Answer:
    """Future of a caller."""

    __slots__ = ("deadline", "future", "life", "retry_after", "timer")

    def __init__(self, future: asyncio.Future[Any], deadline: float, life: Life | None = None) -> None:
        self.future, self.deadline, self.life = future, deadline, life
        self.timer: asyncio.TimerHandle | None = None
        self.retry_after = ""
        """of the answer's header"""

    def arm(self) -> None:
        """It may come too late, or never."""
        if self.timer is None:
            self.timer = self.future.get_loop().call_at(self.deadline, self.fail, TimeoutError())

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def give(self, result: tuple[int, bytes]) -> None:
        if not self.future.done():
            self.future.set_result(result)


class Node:
    """A server's machine: whether its process runs, and what the network does to its calls."""

    def __init__(self, place: int, server: SimServer) -> None:
        self.place, self.server = place, server
        self.up, self.frozen, self.cut = True, False, False
        self.inbox: list[Callable[[], None]] = []
        """what arrived while it was frozen"""
        self.pending: dict[Answer, None] = {}
        """answers that somebody waits for"""
        self.births = 0
        """processes so far: a connection to a dead one leads nowhere"""
        self.counts: dict[str, int] = {}
        self.triggers: list[Fault] = []
        self.wire: list[tuple[Fault, int]] = []
        """faults of single calls, and how many calls each still hits"""


class Network:
    """Carries calls to the nodes, with delays and faults that follow from the seed.

    Args:
        loop: the simulated one.
        nodes: by ``host:port``.
        broadcasts: the groups that servers join.
        seed: of the delays.
        latency: mean seconds of one way.
        note: gets a line for each event.
        apply: makes a fault that waits for a call happen.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        nodes: dict[str, Node],
        broadcasts: Broadcasts,
        *,
        seed: int,
        latency: float,
        note: Callable[[str], None] | None,
        apply: Callable[[Fault], None],
    ) -> None:
        self._loop, self._nodes, self._broadcasts, self._random = loop, nodes, broadcasts, random.Random(seed ^ 0x5EED)
        self._latency, self._note, self._apply = latency, note, apply

    def session(self, life: Life) -> Session:
        """Session that ``HttpClient`` sends through."""
        return Session(self, life)

    async def call(
        self, life: Life, method: str, url: str, body: Any, limits: aiohttp.ClientTimeout
    ) -> tuple[int, bytes, str]:
        """Status, content and ``Retry-After``, or the exceptions that aiohttp raises."""
        parts = urlsplit(url)
        node = self._nodes[parts.netloc]
        if life.dead:
            raise aiohttp.ServerDisconnectedError
        answer = Answer(self._loop.create_future(), self._loop.time() + (limits.total or 1e9), life)
        life.watch.sent(parts.netloc, parts.path, body)
        self._connect(node, parts.path, body, answer, limits)
        node.pending[answer] = None
        try:
            status, content = await answer.future
            life.watch.answered(parts.netloc, parts.path, body, status, content)
            return status, content, answer.retry_after
        finally:
            if answer.timer is not None:
                answer.timer.cancel()
            node.pending.pop(answer, None)

    def _connect(self, node: Node, path: str, body: Any, answer: Answer, limits: Any) -> None:
        way = self._way()
        if node.cut:
            wait = limits.sock_connect or 5.0
            self._later(wait, answer.fail, aiohttp.ConnectionTimeoutError(f"to {node.place}"))
        elif not node.up:
            key: Any = SimpleNamespace(host=f"s{node.place}", port=80, ssl=False, is_ssl=False)
            refused = aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "Connection refused"))
            self._later(way, answer.fail, refused)
        else:
            self._later(way, self._arrive, node, path, body, answer)

    def _way(self) -> float:
        return self._latency * (0.2 + 1.6 * self._random.random())

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(seconds, call, *args)

    def _arrive(self, node: Node, path: str, body: Any, answer: Answer) -> None:
        """The call is at the server's machine: the server handles it, whether or not its sender still waits."""
        if not node.up:
            return answer.fail(aiohttp.ServerDisconnectedError())
        if answer.life is not None:
            answer.life.watch.arrived(f"s{node.place}:80", path, body)
        node.counts[path] = count = node.counts.get(path, 0) + 1
        for fault in [f for f in node.triggers if f.on == path and f.nth <= count]:
            node.triggers.remove(fault)
            self._apply(fault)
        if not node.up:
            return answer.fail(aiohttp.ServerDisconnectedError())
        fault = self._wire_fault(node, path)
        if fault is None:
            return self._deliver(node, path, body, answer)
        self._say(f"s{node.place} {path}: {fault.kind}")
        self._disturb(fault, node, path, body, answer)

    def _disturb(self, fault: Fault, node: Node, path: str, body: Any, answer: Answer) -> None:
        answer.arm()
        nobody = Answer(self._loop.create_future(), answer.deadline)
        match fault.kind:
            case "lose_request":
                pass
            case "lose_answer":
                self._deliver(node, path, body, nobody)
            case "reset_before":
                answer.fail(aiohttp.ServerDisconnectedError())
            case "reset_after":
                self._deliver(node, path, body, nobody)
                self._later(self._way(), answer.fail, aiohttp.ClientOSError(104, "Connection reset by peer"))
            case "twice":
                self._deliver(node, path, body, answer)
                self._later(fault.span, self._deliver_late, node.births, node, path, body, nobody)
            case "late":
                self._later(fault.span, self._deliver_late, node.births, node, path, body, answer)
            case "status":
                status = STATUSES[fault.choice % len(STATUSES)]
                answer.retry_after = RETRY_AFTER[fault.choice // len(STATUSES) % len(RETRY_AFTER)]
                self._later(self._way(), answer.give, (status, b'{"error": {"message": "not now"}}'))
            case "junk":
                self._later(self._way(), answer.give, (200, JUNK[fault.choice % len(JUNK)]))
            case _:
                raise ValueError(fault.kind)

    def _wire_fault(self, node: Node, path: str) -> Fault | None:
        now = self._loop.time()
        node.wire = [(f, left) for f, left in node.wire if left and now < f.at + f.span]
        for i, (fault, left) in enumerate(node.wire):
            if not fault.on or fault.on == path:
                node.wire[i] = (fault, left - 1)
                return fault
        return None

    def _deliver_late(self, births: int, node: Node, path: str, body: Any, answer: Answer) -> None:
        if node.births != births:
            return answer.fail(aiohttp.ServerDisconnectedError())
        self._deliver(node, path, body, answer)

    def _deliver(self, node: Node, path: str, body: Any, answer: Answer) -> None:
        if not node.up:
            return answer.fail(aiohttp.ServerDisconnectedError())
        if node.frozen:
            answer.arm()
            node.inbox.append(lambda: self._deliver(node, path, body, answer))
            return
        if path in _SLOW:
            if answer.future.cancelled():
                return  # its sender hung up before the server read it
            answer.arm()
        if self._note is not None:
            self._say(f"s{node.place} {path} {str(body)[:300]}")
        reply = partial(self._reply, node, path, answer)
        if path == "/update_weights_from_distributed":
            self._broadcasts.arrive(node, body, reply)
        elif path == "/init_weights_update_group":
            self._broadcasts.join(node, body, reply)
        else:
            node.server.handle(path, body, reply)

    def _reply(self, node: Node, path: str, answer: Answer, status: int, content: Any) -> None:
        if node.frozen:
            answer.arm()
            node.inbox.append(lambda: self._reply(node, path, answer, status, content))
            return
        if self._note is not None:
            self._say(f"s{node.place} {path} -> {status} {str(content)[:400]}")
        result = (status, _SHORT.get(id(content)) or json.dumps(content).encode())
        if self._random.random() < 0.7:  # most answers take no time of their own: half of the events
            answer.give(result)
        else:
            answer.arm()
            self._later(self._way(), answer.give, result)

    def _say(self, text: str) -> None:
        if self._note is not None:
            self._note(text)


class Session:
    """As much of an ``aiohttp.ClientSession`` as ``HttpClient`` uses."""

    def __init__(self, network: Network, life: Life) -> None:
        self._network, self._life = network, life

    def request(self, method: str, url: str, *, data: Any, timeout: aiohttp.ClientTimeout, **_: Any) -> Exchange:
        text = data.getvalue() if isinstance(data, io.BytesIO) else data
        body = None if text is None else {} if text == b"{}" else json.loads(text)
        return Exchange(self._network.call(self._life, method, url, body, timeout))

    async def close(self) -> None:
        """Nothing to free."""


class Exchange(AbstractAsyncContextManager["Exchange"]):
    """One answer."""

    def __init__(self, call: Any) -> None:
        self._call, self.status, self.headers = call, 0, dict[str, str]()
        self._content = b""

    async def __aenter__(self) -> Exchange:
        self.status, self._content, retry_after = await self._call
        self.headers = {"Retry-After": retry_after} if retry_after else {}
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def content(self) -> Exchange:
        return self

    async def read(self) -> bytes:
        return self._content

    async def iter_any(self) -> AsyncIterator[bytes]:
        if self._content:
            yield self._content
