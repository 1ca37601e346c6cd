"""Broadcast groups of trainer and simulated servers: a ``GroupTransport`` whose members are ``Node``s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_dppo.weights.transfer_group import TensorBucket
from megatron_dppo_engines.server import transfer_group_name

Reply = Callable[[int, Any], None]
_BROKEN = (400, {"success": False, "message": "connection closed by peer"})


class Group:
    """Rank 0 and servers that have met, or are about to."""

    def __init__(self, size: int, opened: asyncio.Future[Any]) -> None:
        self.size, self.opened = size, opened
        self.joining: dict[Any, Reply] = {}
        self.members: list[Any] = []
        self.broken = False
        self.bucket: TensorBucket | None = None
        self.sent: asyncio.Future[Any] | None = None
        self.receivers: dict[Any, Reply] = {}

    def join(self, node: Any, reply: Reply) -> None:
        if self.broken or self.members:
            return reply(*_BROKEN)
        self.joining[node] = reply
        if len(self.joining) == self.size - 1:
            self.members = list(self.joining)
            for answer in self.joining.values():
                answer(200, {"success": True})
            if not self.opened.done():
                self.opened.set_result(self)

    def receive(self, node: Any, reply: Reply) -> None:
        if self.broken or node not in self.members:
            return reply(*_BROKEN)
        self.receivers[node] = reply
        self.pass_on()

    def pass_on(self) -> None:
        """The bucket reaches all when all are there."""
        if self.bucket is None or self.sent is None or len(self.receivers) < len(self.members):
            return
        receivers, self.receivers = self.receivers, {}
        tensors, self.bucket = _split(self.bucket), None
        for node, reply in receivers.items():
            node.server.take_broadcast(tensors)
            reply(200, {"success": True})
        if not self.sent.done():
            self.sent.set_result(None)

    def break_off(self) -> None:
        """Somebody has left."""
        self.broken = True
        receivers, self.receivers = self.receivers, {}
        joining, self.joining = ({} if self.members else self.joining), {}
        for reply in [*receivers.values(), *joining.values()]:
            reply(*_BROKEN)
        for future in (self.sent, self.opened):
            if future is not None and not future.done():
                future.set_exception(RuntimeError("connection closed by peer"))
                future.exception()


class Broadcasts:
    """All groups of a run, and the trainer's side of them.

    Args:
        loop: the simulated one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._port = loop, 40000
        self._groups: dict[str, Group] = {}
        self._early: dict[str, list[tuple[Any, Reply]]] = {}

    def listen(self, host: str) -> tuple[Any, int]:
        self._port += 1
        return (host, self._port), self._port

    async def open(self, listener: Any, *, name: str, world_size: int, backend: str, timeout: float) -> Group:
        assert name == transfer_group_name(*listener)
        group = self._groups[name] = Group(world_size, self._loop.create_future())
        for node, reply in self._early.pop(name, []):
            group.join(node, reply)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(group.opened)
        except TimeoutError:
            group.break_off()
            raise RuntimeError("not all members came") from None
        return group

    async def broadcast(self, bucket: TensorBucket, group: Group) -> None:
        if group.broken:
            raise RuntimeError("connection closed by peer")
        group.bucket, group.sent = bucket, self._loop.create_future()
        group.pass_on()
        try:
            async with asyncio.timeout(300):
                await asyncio.shield(group.sent)
        except TimeoutError:
            group.break_off()
            raise RuntimeError("the broadcast took too long") from None

    def close(self, group: Group) -> None:
        group.break_off()

    # the servers' side

    def join(self, node: Any, body: Any, reply: Reply) -> None:
        name = body["group_name"]
        node.server.group = name
        if name in self._groups:
            self._groups[name].join(node, reply)
        else:
            self._early.setdefault(name, []).append((node, reply))

    def arrive(self, node: Any, body: Any, reply: Reply) -> None:
        if node.server.group != body["group_name"] or body["group_name"] not in self._groups:
            return reply(400, {"success": False, "message": "no such group"})
        self._groups[body["group_name"]].receive(node, reply)

    def gone(self, node: Any | None) -> None:
        """A server has died; None = the trainer."""
        for group in self._groups.values():
            if node is None or node in group.members or node in group.joining:
                group.break_off()
        if node is None:
            self._groups, self._early = {}, {}


def _split(bucket: TensorBucket) -> dict[str, bytes]:
    tensors, start = {}, 0
    data = bucket.data.numpy().tobytes()
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = 4
        for length in shape:
            size *= length
        tensors[name] = data[start : start + size]
        start += size
    return tensors
