"""Which servers are asked with random adapters, and that all have the policy's own afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.servers import ServersConfig, WeightSyncConfig
from megatron_dppo.errors import PublishError
from megatron_dppo.weights.adapter_proof import AdapterProof
from megatron_dppo.weights.probe import ProbeFindings
from megatron_dppo.weights.publish import ServerPublisher
from tests.unit.weight_server import FakeServer, make, weights

NAME = "base_model.model.w.lora_B.weight"


class _Trainer:
    """On one rank; version n has an adapter of n, a random one is of -7."""

    groups = SimpleNamespace(world=None)
    optimizer = SimpleNamespace(finish_overlapped_gather=lambda: None)
    policy_version, is_randomized = 0, False

    def __init__(self) -> None:
        self.lora = SimpleNamespace(randomized=self._randomized)
        self.bridge = SimpleNamespace(export=lambda value: iter(weights(0).items()))

    @contextmanager
    def _randomized(self) -> Iterator[None]:
        self.is_randomized = True
        yield
        self.is_randomized = False

    def adapter(self) -> Tensor:
        return torch.full((2,), -7.0 if self.is_randomized else float(self.policy_version))

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        return iter([(NAME, self.adapter())])


class _Run:
    def __init__(self, servers: list[FakeServer], folder: Path, **keys: Any) -> None:
        self.servers, self.trainer, self.probed = servers, _Trainer(), list[tuple[bool, list[str]]]()
        settings = WeightSyncConfig(method="adapter", attempts=2, **keys)
        rollout: Any = SimpleNamespace(weight_sync=settings, servers=ServersConfig())
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        sync = make(servers, folder, adapter={"r": 4}, method="adapter", **keys)
        trainer: Any = self.trainer
        probe: Any = SimpleNamespace(run=self._probe)
        proof = AdapterProof(trainer, sync, probe, proves_base=settings.checksum_every > 0)
        self.publisher = ServerPublisher(trainer, None, sync, rollout=rollout, probe=probe, adapters=proof)

    def _probe(self, sync: object, urls: Sequence[str], version: int) -> ProbeFindings:
        """As the real one: what a server adds has to be what the trainer has."""
        self.probed.append((self.trainer.is_randomized, sorted(urls)))
        expected = self.trainer.adapter()
        wrong = {s.url for s in self.servers if s.url in urls and not torch.equal(s.adds(), expected)}  # type: ignore[attr-defined]
        return ProbeFindings(dict.fromkeys(wrong, "other numbers"), {})


class _Server(FakeServer):
    """``deaf``: it confirms adapters and adds none."""

    deaf = False

    def __init__(self, name: str, seed: int = 0) -> None:
        super().__init__(name)
        self.weights = weights(seed)

    def adds(self) -> Tensor:
        return torch.zeros(2) if self.deaf else self.adapter[NAME]


def test_each_server_is_probed_with_random_adapters_once_and_after_a_restart(tmp_path: Path) -> None:
    servers = [_Server("a:1"), _Server("b:2")]
    both = [server.url for server in servers]
    run = _Run(list(servers), tmp_path / "model")
    assert run.publisher.publish() == []
    assert run.probed == [(True, both), (False, both)]
    assert all(torch.equal(server.adapter[NAME], torch.zeros(2)) and not server.paused for server in servers)
    run.trainer.policy_version = 1
    servers[1].version, servers[1].adapter = -1, {}
    run.probed.clear()
    assert run.publisher.publish() == []
    assert run.probed == [(True, both[1:]), (False, both)]
    assert all(torch.equal(server.adapter[NAME], torch.ones(2)) and server.version == 1 for server in servers)
    assert [server.calls.count("update_adapter") for server in servers] == [3 + 1, 3 + 3]
    run.publisher.close()


def test_a_server_that_omits_adapters_is_named_although_the_first_ones_are_zero(tmp_path: Path) -> None:
    server = _Server("a:1")
    server.deaf = True
    run = _Run([server], tmp_path / "model", probe_every=0)
    with pytest.raises(PublishError, match="does not add"):
        run.publisher.publish()
    run.publisher.close()


@pytest.mark.parametrize(("keys", "refused"), [({}, True), ({"checksum_every": 0}, False)])
def test_a_server_with_another_base_model_is_found_by_its_digests(
    keys: dict[str, int], refused: bool, tmp_path: Path
) -> None:
    run = _Run([_Server("a:1", seed=5), _Server("b:2")], tmp_path / "model", **keys)
    notes = run.publisher.publish()
    assert bool(notes) == refused
    if refused:
        assert all("http://a:1" in note and "the base model of model.path: w0, w1" in note for note in notes)
    run.publisher.close()
