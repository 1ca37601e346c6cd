"""Attempts at one version: who has the weights keeps them, and who broke a broadcast does not break the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.errors import PublishError, ServerError
from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.probe import ProbeFindings
from megatron_dppo.weights.publish import ServerPublisher
from tests.unit.weight_server import FakeServer, make, weights
from tests.unit.weights.test_publish import publisher


class Groups:
    """A ``GroupTransport`` in this process: a group is the number of its port."""

    def __init__(self) -> None:
        self.port, self.broadcasts = 0, 0
        self.members: dict[int, list[Member]] = {}
        self.bucket: Any = None

    def listen(self, host: str) -> tuple[int, int]:
        self.port += 1
        return self.port, self.port

    async def open(self, listener: int, **_: object) -> int:
        return listener

    async def broadcast(self, bucket: Any, group: int) -> None:
        self.broadcasts += 1
        missing = [member.url for member in self.members[group] if member.updating is False]
        assert not missing, f"the broadcast would wait for {missing}"
        self.bucket = bucket

    def close(self, group: int) -> None:
        pass


class Member(FakeServer):
    """A server that takes broadcasts, as long as its process is the one that joined the group."""

    def __init__(self, name: str, groups: Groups) -> None:
        super().__init__(name)
        self.groups, self.group = groups, 0
        self.dies_after_broadcast = False

    async def join_group(self, host: str, port: int, offset: int, size: int, backend: str) -> None:
        self._called("join_group")
        self.group = port
        self.groups.members.setdefault(port, []).append(self)

    async def leave_group(self) -> None:
        self.group = 0

    async def receive_broadcast(self, names: Sequence[str], dtypes: object, shapes: Sequence[Any]) -> None:
        self._called("receive_broadcast")
        if self.group != self.groups.port:
            raise ServerError(self.url, "no such group", 400)
        while self.groups.bucket is None or self.groups.bucket.names != names:
            await asyncio.sleep(0)
        parts = self.groups.bucket.data.view(torch.float32).split([torch.Size(shape).numel() for shape in shapes])
        self._load({n: part.view(*shape) for n, part, shape in zip(names, parts, shapes, strict=True)})

    async def end_update(self, version: int) -> None:
        self.groups.bucket = None
        if self.dies_after_broadcast:
            self.dies_after_broadcast = self.updating = False
            self.version, self.weights, self.group = -1, {}, 0
            raise ServerError(self.url, "Server disconnected")
        await super().end_update(version)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def broadcasting(
    count: int, attempts: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Member], ServerPublisher]:
    groups = Groups()
    servers = [Member(f"{name}:1", groups) for name in "abc"[:count]]
    _, sender = publisher(list(servers), folder, monkeypatch)
    sync = make(list(servers), folder, method="distributed", host="127.0.0.1")
    sync._broadcasts._transport = groups
    sender._sync = sync
    allow(sender, attempts)
    return servers, sender


def allow(sender: ServerPublisher, attempts: int) -> None:
    settings: Any = sender.rollout
    settings.weight_sync = settings.weight_sync.model_copy(update={"attempts": attempts})


def test_a_server_that_restarts_at_the_end_of_a_broadcast_costs_the_others_nothing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), sender = broadcasting(2, 2, model_folder, monkeypatch)
    a.dies_after_broadcast = True
    (note,) = sender.publish()
    assert "attempt 1: http://a:1: Server disconnected" in note
    for server in (a, b):
        assert server.holds(weights(0)) and server.version == 0 and not server.paused
    assert b.calls.count("pause") == 1 and b.calls.count("receive_broadcast") == 5, "the second attempt left it alone"
    sender._trainer.policy_version = 1
    assert sender.publish() == [] and a.group == b.group, "from the next version on they are together again"
    assert a.holds(weights(1)) and b.holds(weights(1))


def test_a_server_that_dies_in_the_last_attempt_joins_a_new_group_at_the_next_version(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), sender = broadcasting(2, 1, model_folder, monkeypatch)
    a.dies_after_broadcast = True
    assert len(sender.publish()) == 1 and b.holds(weights(0)) and a.version == -1
    sender._trainer.policy_version = 1
    assert sender.publish() == [] and a.holds(weights(1)) and b.holds(weights(1))


def test_a_server_that_restarts_in_the_probe_joins_a_new_group(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), sender = broadcasting(1, 2, model_folder, monkeypatch)

    def restart(*_: object) -> ProbeFindings:
        silent = {} if a.calls.count("join_group") > 1 else {a.url: "no answer"}
        if silent:
            a.version, a.weights, a.group = -1, {}, 0
        return ProbeFindings({}, silent)

    sender._probe = SimpleNamespace(run=restart)  # type: ignore[assignment]
    assert len(sender.publish()) == 1 and a.holds(weights(0)) and a.version == 0


def test_a_server_that_restarted_since_the_last_version_costs_no_attempt(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), sender = broadcasting(2, 1, model_folder, monkeypatch)
    assert sender.publish() == []
    a.version, a.weights, a.group = -1, {}, 0
    sender._trainer.policy_version = 1
    assert sender.publish() == [] and a.holds(weights(1)) and b.holds(weights(1)) and a.group == b.group
    sender._trainer.policy_version = 2
    assert sender.publish() == [] and a.calls.count("join_group") == 2, "who stays the same stays in its group"


@pytest.mark.parametrize("call", ["join_group", "begin_update", "receive_broadcast"])
def test_a_server_that_broke_an_attempt_waits_until_the_others_are_synced(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (a, b, c), sender = broadcasting(3, 2, model_folder, monkeypatch)
    a.fails = {call: 9}
    first, *_, last = sender.publish()
    assert f"attempt 1: http://a:1: {call} refused" in first and "attempt 2: http://a:1: gets the weights after" in last
    assert b.holds(weights(0)) and c.holds(weights(0)) and not (b.paused or c.paused) and a.version == -1
    a.fails = {call: 1}
    allow(sender, 3)
    sender._trainer.policy_version = 1
    sender.publish()
    assert all(server.holds(weights(1)) and server.version == 1 and not server.paused for server in (a, b, c))


def test_a_server_that_always_fails_alone_ends_the_run_after_all_attempts(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), sender = broadcasting(1, 3, model_folder, monkeypatch)
    a.fails = {"receive_broadcast": 9}
    with pytest.raises(PublishError, match=r"(?s)attempt 1: .*attempt 2: .*attempt 3: "):
        sender.publish()


def test_a_retry_is_compared_with_the_synced_servers(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [FakeServer(f"{name}:1") for name in "abc"]
    for server in servers:
        server.plain = False  # quantised, say: only equality tells
    servers[1].corrupts = {"w3"}
    _, sender = publisher(servers, model_folder, monkeypatch)
    notes = sender.publish()
    differs = "http://b:1: its weights differ from those of the other servers: w3"
    assert any("attempt 1" in note and differs in note for note in notes), notes
    assert any("attempt 2" in note and differs in note for note in notes), notes
    assert servers[0].calls.count("pause") == servers[2].calls.count("pause") == 1 and servers[1].paused


async def _failing(attempt: Attempt, errors: list[ServerError]) -> None:
    async def fail(server: Any) -> None:
        raise next(error for error in errors if error.url == server.url)

    for error in errors:  # in this order
        await attempt.call_each([FakeServer(error.url.removeprefix("http://"))], fail)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("errors", "culprits"),
    [
        ([], set()),
        ([("a", 400), ("b", 400)], {"http://a"}),
        ([("a", 400), ("b", None)], {"http://b"}),
        ([("a", None), ("b", 400), ("c", None)], {"http://a", "http://c"}),
    ],
)
def test_culprits_are_the_unresponsive_servers_or_the_first_to_fail(
    errors: list[tuple[str, int | None]], culprits: set[str]
) -> None:
    attempt = Attempt(0, {})
    asyncio.run(_failing(attempt, [ServerError(f"http://{name}", "x", status) for name, status in errors]))
    assert attempt.find_culprits() == culprits
