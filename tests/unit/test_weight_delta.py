"""Which servers are sent only what changed, and that none ever has other weights than those that were sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError
from megatron_dppo.rollout.attempt import SyncResult
from megatron_dppo.weights.sync import WeightSync
from tests.unit.configs import config
from tests.unit.weight_server import FakeServer, make

A, B = "http://a:1", "http://b:2"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def pair() -> list[FakeServer]:
    return [FakeServer("a:1"), FakeServer("b:2")]


def weights(version: int) -> dict[str, Tensor]:
    """Some elements of w0 and w1 change at each version, all of w2, none of w3."""
    generator = torch.Generator().manual_seed(5)
    found = {f"w{i}": torch.randn(40, 100, generator=generator) for i in range(4)}
    for i in range(version):
        for name in ("w0", "w1"):
            found[name].view(-1)[i::97] += 1.0
        found["w2"] += 1.0
    return found


def send(sync: WeightSync, version: int) -> SyncResult:
    return sync.send(iter(weights(version).items()), version)


def forms(server: FakeServer) -> list[str]:
    """How it got its weights since the last call of this, in short; and that it holds a version."""
    found = [call.removeprefix("receive_") for call in server.calls if call.startswith("receive_")]
    server.calls.clear()
    return found


def good(server: FakeServer, version: int) -> bool:
    return server.holds(weights(version)) and server.version == version and not server.paused


def test_after_the_first_sync_each_server_gets_what_changed_and_nothing_where_nothing_did(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sync = make(pair, model_folder, delta=True)
    for version in range(3):
        result = send(sync, version)
        assert len(result.good) == 2 and not result.notes
        for server in pair:
            assert good(server, version) and forms(server) == (["patches"] if version else ["tensors"])
    sync.send(iter(weights(2).items()), 3)
    for server in pair:
        assert server.holds(weights(2)) and server.version == 3 and forms(server) == []
    everywhere = weights(2) | {"w2": weights(3)["w2"]}
    assert len(sync.send(iter(everywhere.items()), 4).good) == 2
    for server in pair:
        assert server.holds(everywhere) and forms(server) == ["patches"]


def test_one_that_restarted_gets_everything_and_the_others_what_changed(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sync = make(pair, model_folder, delta=True)
    send(sync, 0)
    pair[0].version, pair[0].weights = -1, {name: torch.zeros(40, 100) for name in weights(0)}
    for server in pair:
        server.calls.clear()
    assert len(send(sync, 1).good) == 2 and all(good(server, 1) for server in pair)
    assert forms(pair[0]) == ["tensors"] and forms(pair[1]) == ["patches"]
    assert len(send(sync, 2).good) == 2 and forms(pair[0]) == forms(pair[1]) == ["patches"]


@pytest.mark.parametrize("lost", ["w1", "w3"])
def test_other_weights_under_the_right_version_are_found_and_the_next_attempt_sends_everything(
    pair: list[FakeServer], model_folder: Path, lost: str
) -> None:
    """A restart that the version does not show, or an update that was lost; also of a tensor that is not sent again."""
    sync = make(pair, model_folder, delta=True)
    send(sync, 0)
    pair[0].weights[lost] = torch.zeros(40, 100)
    pair[0].calls.clear()
    result = send(sync, 1)
    assert list(result.good) == [B] and result.failed[A].startswith(f"{lost}: not what was sent")
    assert forms(pair[0]) == ["patches"]
    result = sync.send(iter(weights(1).items()), 1, result.good)
    assert len(result.good) == 2 and good(pair[0], 1) and forms(pair[0]) == ["tensors"]
    assert len(send(sync, 2).good) == 2 and forms(pair[0]) == ["patches"]


def test_a_patch_that_is_confirmed_and_not_taken_is_found(model_folder: Path) -> None:
    server = FakeServer("a:1")
    sync = make([server], model_folder, delta=True)
    send(sync, 0)
    server.ignores = {"w0"}
    assert send(sync, 1).failed[A].startswith("w0: not what was sent") and server.paused
    server.ignores = set()
    forms(server)
    assert send(sync, 1).good and good(server, 1) and forms(server) == ["tensors"]


def test_one_that_was_proved_and_then_broken_by_another_attempt_gets_everything(model_folder: Path) -> None:
    server = FakeServer("a:1")
    sync = make([server], model_folder, delta=True)
    send(sync, 0)
    server.corrupts = {"w0"}
    assert not send(sync, 0).good and server.version == 0
    server.corrupts = set()
    forms(server)
    assert send(sync, 1).good and good(server, 1) and forms(server) == ["tensors"]


@pytest.mark.parametrize("call", ["pause", "begin_update", "receive_patches", "end_update", "weight_sums", "resume"])
def test_one_that_fails_anywhere_gets_everything_next_in_another_attempt_or_version(
    pair: list[FakeServer], model_folder: Path, call: str
) -> None:
    for again in (False, True):
        sync = make(pair, model_folder, delta=True)
        send(sync, 0)
        pair[0].fails = {call: 1}
        result = send(sync, 1)
        assert list(result.good) == [B] and good(pair[1], 1)
        for server in pair:
            server.calls.clear()
        version = 1 if again else 2
        result = sync.send(iter(weights(version).items()), version, result.good if again else None)
        assert len(result.good) == 2 and good(pair[0], version)
        # One that has the weights, by its digests, and only did not go on is as good as the others.
        assert forms(pair[0]) == (["patches"] if call == "resume" and not again else ["tensors"])
        assert forms(pair[1]) == ([] if again else ["patches"])


def test_after_a_stream_that_broke_off_everybody_gets_everything(pair: list[FakeServer], model_folder: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(1).items())[:2]
        raise RuntimeError("a rank died")

    sync = make(pair, model_folder, delta=True)
    send(sync, 0)
    pair[1].fails = {"info": 1}  # it was not there, and is as it was
    with pytest.raises(RuntimeError, match="a rank died"):
        sync.send(broken(), 1)
    for server in pair:  # as if it had not begun
        server.version, server.weights = 0, weights(0)
        server.calls.clear()
    assert len(send(sync, 2).good) == 2
    assert all(good(server, 2) and forms(server) == ["tensors"] for server in pair)


def test_when_all_servers_failed_the_version_before_is_none_to_build_on(
    pair: list[FakeServer], model_folder: Path
) -> None:
    sync = make(pair, model_folder, delta=True)
    send(sync, 0)
    for server in pair:
        server.fails = {"receive_patches": 1}
    assert not send(sync, 1).good
    # They come back with what they had, under its version.
    for server in pair:
        server.version, server.weights = 0, weights(0)
        server.calls.clear()
    assert len(send(sync, 2).good) == 2
    assert all(good(server, 2) and forms(server) == ["tensors"] for server in pair)


def test_one_whose_tensors_no_digest_proves_gets_everything_and_the_user_is_told(
    pair: list[FakeServer], model_folder: Path
) -> None:
    pair[0].plain = False  # quantised, say
    sync = make(pair, model_folder, delta=True)
    for version in range(2):
        result = send(sync, version)
        assert len(result.good) == 2 and "gets all weights at each sync" in result.notes[A] and B not in result.notes
    assert forms(pair[0]) == ["tensors", "tensors"] and forms(pair[1]) == ["tensors", "patches"]


def test_another_life_of_the_trainer_begins_with_everything(pair: list[FakeServer], model_folder: Path) -> None:
    send(make(pair, model_folder, delta=True), 0)
    for server in pair:
        server.calls.clear()
    assert len(send(make(pair, model_folder, delta=True), 1).good) == 2
    assert all(good(server, 1) and forms(server) == ["tensors"] for server in pair)


@pytest.mark.parametrize(
    ("sync", "more", "message"),
    [
        ({"method": "disk"}, {}, "delta = true is for method = 'tensor', not 'disk'"),
        ({"checksum_every": 2}, {}, "set checksum_every = 1"),
        ({"attempts": 1}, {}, "set attempts to 2 or more"),
        ({}, {"engine": "vllm"}, "vLLM loads each layer into fresh memory"),
        ({}, {"servers": {"colocated": True}}, "the servers give up their weights before each update"),
    ],
)
def test_what_does_not_go_together_is_refused(sync: dict[str, object], more: dict[str, object], message: str) -> None:
    found = {"engine": "sglang", "weight_sync": {"method": "tensor", "delta": True} | sync} | more
    with pytest.raises(ConfigError, match=message):
        config(rollout=found)
