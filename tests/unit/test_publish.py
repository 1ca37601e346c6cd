"""What becomes of a run whose servers do not hold what they were sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import PublishError
from megatron_dppo.weights.probe import Findings
from megatron_dppo.weights.publish import ServerPublisher
from tests.unit.weight_server import FakeServer, make, weights


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


class _Trainer:
    """What ``ServerPublisher`` asks of a trainer on one rank."""

    groups = SimpleNamespace(world=None)
    policy_version = 0

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(weights(self.policy_version).items())


def publisher(
    servers: list[FakeServer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[_Trainer, ServerPublisher]:
    probe = SimpleNamespace(run=lambda *_: Findings({}, {}))
    trainer, config = _Trainer(), SimpleNamespace(rollout=SimpleNamespace(weight_sync=WeightSyncConfig(attempts=2)))
    return trainer, ServerPublisher(trainer, None, make(servers, folder), config, probe)  # type: ignore[arg-type]


def test_a_run_whose_server_goes_on_lying_ends_with_its_tensors_and_one_that_stops_lying_goes_on(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer("a:1")
    trainer, sender = publisher([server], model_folder, monkeypatch)
    assert sender.publish() == []
    trainer.policy_version, server.ignores = 1, {"w1", "w3"}
    with pytest.raises(
        PublishError, match=r"(?s)attempt 1: http://a:1: w1, w3: not what was sent.*attempt 2: http://a"
    ):
        sender.publish()
    original = server.weight_sums

    async def lies_once() -> object:
        found, server.ignores = await original(), set()
        return found

    monkeypatch.setattr(server, "weight_sums", lies_once)
    (note,) = sender.publish()
    assert "attempt 1: http://a:1: w1, w3" in note and server.holds(weights(1)) and not server.paused


def test_what_could_not_be_proved_is_said_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
