"""End of a run whose servers do not hold what they were sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.servers import ServersConfig, WeightSyncConfig
from megatron_dppo.errors import NoUsableServer, PublishError
from megatron_dppo.weights import attempt
from megatron_dppo.weights.probe import ProbeFindings
from megatron_dppo.weights.publish import ServerPublisher
from tests.unit.weight_server import FakeServer, make, weights


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


class _Trainer:
    """The part of a trainer on one rank that ``ServerPublisher`` uses."""

    groups = SimpleNamespace(world=None)
    policy_version = 0

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(weights(self.policy_version).items())


def publisher(
    servers: list[FakeServer], folder: Path, monkeypatch: pytest.MonkeyPatch, patience: float = 600.0
) -> tuple[_Trainer, ServerPublisher]:
    # No pause between two calls: what counts is their number, not the time.
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.0)
    probe = SimpleNamespace(run=lambda *_: ProbeFindings({}, {}))
    rollout = SimpleNamespace(
        weight_sync=WeightSyncConfig(attempts=2), servers=ServersConfig(unavailable_timeout_seconds=patience)
    )
    trainer = _Trainer()
    return trainer, ServerPublisher(trainer, None, make(servers, folder), rollout=rollout, probe=probe)  # type: ignore[arg-type]


def test_a_run_ends_with_the_wrong_tensors_unless_the_server_recovers(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer("a:1")
    trainer, sender = publisher([server], model_folder, monkeypatch)
    assert sender.publish() == []
    trainer.policy_version, server.ignores = 1, {"w1", "w3"}
    with pytest.raises(PublishError, match=r"(?s)attempt 1: http://a:1: w1, w3: .*attempt 2: http://a"):
        sender.publish()
    original = server.weight_digests

    async def lies_once() -> object:
        result, server.ignores = await original(), set()
        return result

    monkeypatch.setattr(server, "weight_digests", lies_once)
    (note,) = sender.publish()
    assert "attempt 1: http://a:1: w1, w3" in note and server.holds(weights(1)) and not server.paused


def test_a_publish_waits_for_a_restarting_server_if_none_responds(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [FakeServer("a:1"), FakeServer("b:2")]
    _, sender = publisher(servers, model_folder, monkeypatch)
    for server in servers:
        server.fails = {"info": 3}  # two more rounds of questions after the first attempt
    notes = sender.publish()
    assert len(notes) == 2 and all("attempt 1" in note and "info refused" in note for note in notes)
    assert all(server.holds(weights(0)) for server in servers)
    assert all(not server.fails["info"] for server in servers), "it was called until it responded"


def test_the_run_ends_with_its_own_code_if_no_server_responds_in_time(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer("a:1")
    _, sender = publisher([server], model_folder, monkeypatch, patience=0.3)
    server.fails = {"info": 10**9}
    start = time.monotonic()
    with pytest.raises(NoUsableServer, match=r"(?s)after 2 attempts.*http://a:1: info") as caught:
        sender.publish()
    # At least, whatever else the machine does; the second attempt is the last one, so it is not waited for again.
    assert caught.value.exit_code == 5 and time.monotonic() - start >= 0.3 and server.calls.count("info") > 3
    assert not isinstance(caught.value, PublishError)


def test_unproved_weights_are_reported_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer("a:1")
    trainer, sender = publisher([server], model_folder, monkeypatch)
    server.packs = {"model.layers.0.mlp.experts.w2_weight", "model.layers.1.mlp.experts.w2_weight"}
    experts = {name: torch.randn(4, 4) for name in sorted(server.packs)}
    monkeypatch.setattr(trainer, "export_weights", lambda: iter((weights(trainer.policy_version) | experts).items()))
    (note,) = sender.publish()
    assert (
        note.startswith("http://a:1: model.layers.0.mlp.experts.w2_weight, model.layers.1")
        and "form of its own" in note
    )
    trainer.policy_version = 1
    assert sender.publish() == []


def test_a_server_whose_probe_is_wrong_is_not_used_again_and_the_only_one_ends_the_run(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [FakeServer("a:1"), FakeServer("b:2")]
    trainer, sender = publisher(servers, model_folder, monkeypatch)
    probed: list[list[str]] = []

    def run(_sync: object, urls: list[str], _version: int) -> ProbeFindings:
        probed.append(sorted(urls))
        wrong = {url: f"{url}: scaled" for url in urls if url == "http://a:1"}
        return ProbeFindings(wrong, {}, tuple((url, 0.003) for url in urls if url not in wrong))

    monkeypatch.setattr(sender, "_probe", SimpleNamespace(run=run))
    notes = sender.publish()
    assert probed == [["http://a:1", "http://b:2"], ["http://a:1"]] and any("scaled" in note for note in notes)
    trainer.policy_version = 1
    assert sender.publish() == [], "it is told once"
    assert sender.probed == {"http://b:2": 0.003}, "the guard compares a server's numbers with it"
    assert servers[1].holds(weights(1)) and servers[0].holds(weights(0)), "it gets no more weights"

    _, alone = publisher(servers[:1], model_folder, monkeypatch)
    monkeypatch.setattr(alone, "_probe", SimpleNamespace(run=run))
    with pytest.raises(PublishError, match="http://a:1: scaled"):
        alone.publish()
