"""Makes the faults of a schedule happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import aiohttp

from tests.faults.simulation import lies
from tests.faults.simulation.broadcast import Broadcasts
from tests.faults.simulation.clock import Killed
from tests.faults.simulation.faults import ALL_SPOILS, SPOILS, WIRE, Fault
from tests.faults.simulation.network import Node


class Chaos:
    """The hand that breaks things.

    Args:
        loop: the simulated one.
        nodes: in their order.
        broadcasts: the groups, which hear of deaths.
        note: gets a line for each fault.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        nodes: list[Node],
        broadcasts: Broadcasts,
        note: Callable[[str], None] | None,
    ) -> None:
        self._loop, self._nodes, self._broadcasts, self._note = loop, nodes, broadcasts, note
        self.happened: list[Fault] = []
        self.begun: list[tuple[float, Fault]] = []
        """the same, each with its time"""

    def arm(self, faults: tuple[Fault, ...]) -> None:
        """Set a timer for each fault, or have it wait for its call."""
        for fault in faults:
            if fault.on and fault.kind not in WIRE:
                self._nodes[fault.server].triggers.append(fault)
            else:
                self._loop.call_at(fault.at, self.apply, fault)

    def apply(self, fault: Fault) -> None:
        """Now."""
        self.happened.append(fault)
        self.begun.append((self._loop.time(), fault))
        if self._note is not None:
            self._note(f"FAULT {fault}")
        node = self._nodes[fault.server]
        if fault.kind in WIRE:
            node.wire.append((fault, 1 + fault.choice % 3))
        elif fault.kind.startswith("lie:"):
            self._lie(fault, node)
        else:
            getattr(self, f"_{fault.kind}")(fault, node)

    def _later(self, fault: Fault, call: Callable[[], None]) -> None:
        self._loop.call_later(fault.span, call)

    def _crash(self, fault: Fault, node: Node) -> None:
        if not node.up:
            return
        node.up = node.frozen = False
        node.server.stop()
        node.inbox.clear()
        pending, node.pending = node.pending, {}
        for answer in pending:
            answer.fail(aiohttp.ServerDisconnectedError())
        self._broadcasts.gone(node)
        self._later(fault, partial(self._restart, fault, node))

    def dies(self, node: Node, reason: str) -> None:
        """The process ends by itself, and is started again."""
        if self._note is not None:
            self._note(f"s{node.place} DIES: {reason}")
        self._loop.call_soon(self._crash, Fault("crash", node.place, self._loop.time(), 5.0, 0), node)

    def _restart(self, fault: Fault, node: Node) -> None:
        past, label, which = node.server.past, node.server.label, fault.choice % 8
        weights = past[0]
        if which in (4, 5):
            weights = past[(fault.choice >> 4) % len(past)]
        elif which == 7:
            weights = past[-1]
        node.server.start(dict(weights), label if which in (5, 6) else "default")
        node.up, node.births = True, node.births + 1
        if self._note is not None:
            self._note(f"s{node.place} is up again with weights {node.server.digest:x} called {node.server.label!r}")

    def _freeze(self, fault: Fault, node: Node) -> None:
        if not node.up or node.frozen:
            return
        node.frozen = True
        self._later(fault, partial(self._thaw, node))

    def _thaw(self, node: Node) -> None:
        node.frozen = False
        inbox, node.inbox = node.inbox, []
        for call in inbox:
            call()

    def _slow(self, fault: Fault, node: Node) -> None:
        node.server.slow = 10.0
        self._later(fault, partial(setattr, node.server, "slow", 1.0))

    def _partition(self, fault: Fault, node: Node) -> None:
        node.cut = True
        self._later(fault, partial(setattr, node, "cut", False))

    def _skip_update(self, fault: Fault, node: Node) -> None:
        node.server.skip_update = True
        self._later(fault, partial(setattr, node.server, "skip_update", False))

    def _stuck_label(self, fault: Fault, node: Node) -> None:
        node.server.stuck_label = True
        self._later(fault, partial(setattr, node.server, "stuck_label", False))

    def _silent_ranks(self, fault: Fault, node: Node) -> None:
        node.server.silent_ranks = True
        self._later(fault, partial(setattr, node.server, "silent_ranks", False))

    def _spoil_tensor(self, fault: Fault, node: Node) -> None:
        # Drawn choices have 16 bits.
        spoils = SPOILS[:2] if fault.choice < ALL_SPOILS else SPOILS
        node.server.spoil = spoils[fault.choice % len(spoils)]

    def _corrupt(self, fault: Fault, node: Node) -> None:
        """Weights change without anybody having asked."""
        name = sorted(node.server.weights)[fault.choice % len(node.server.weights)]
        data = node.server.weights[name]
        node.server.weights = {**node.server.weights, name: bytes([data[0] ^ 2]) + data[1:]}

    def _label(self, fault: Fault, node: Node) -> None:
        """The version's name changes without anybody having asked."""
        node.server.label = ("default", "0", "1", "2", "3")[fault.choice % 5]

    def _abort_all(self, fault: Fault, node: Node) -> None:
        if node.up and not node.frozen:
            node.server.abort_all()

    def _kill_trainer(self, fault: Fault, node: Node) -> None:
        raise Killed

    def _lie(self, fault: Fault, node: Node) -> None:
        lie = lies.named(fault.kind.removeprefix("lie:"))
        node.server.lie = lambda columns, server: lie(columns, server, fault.choice)
        self._later(fault, partial(setattr, node.server, "lie", None))
