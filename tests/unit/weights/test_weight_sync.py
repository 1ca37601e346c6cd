"""New weights to several servers: order, buckets, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.weights import sync as weight_sync
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import TensorDigests
from tests.unit.weight_server import CPU, FakeServer, make, weights


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def pair() -> list[FakeServer]:
    return [FakeServer("a:1"), FakeServer("b:2")]


@pytest.mark.parametrize("method", ["ipc", "disk"])
def test_all_servers_get_exactly_the_weights_and_the_version_and_generate_again(
    pair: list[FakeServer], model_folder: Path, method: str
) -> None:
    sync = make(pair, model_folder, method=method)
    for version in (0, 1):
        result = sync.send(iter(weights(version).items()), version)
        assert result.good.keys() == {"http://a:1", "http://b:2"} and not result.failed and not result.absent
        for server in pair:
            assert server.holds(weights(version)) and server.version == version and not server.paused


def test_buckets_keep_below_their_size_and_a_larger_tensor_goes_alone(
    pair: list[FakeServer], model_folder: Path
) -> None:
    make(pair, model_folder).send(iter(weights(0).items()), 0)
    assert pair[0].calls.count("receive_handles") == 5  # 1.2 MB each: no two fit into 2 MiB
    pair[0].calls.clear()
    make(pair, model_folder, torch.bfloat16).send(iter(weights(0).items()), 0)
    assert pair[0].calls.count("receive_handles") == 2  # 0.6 MB each: three and two
    assert pair[0].weights["w0"].dtype == torch.bfloat16


def test_a_stream_that_reuses_memory_is_sent_unchanged(pair: list[FakeServer], model_folder: Path) -> None:
    def reusing() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    make(pair, model_folder).send(reusing(), 0)
    assert [float(pair[1].weights[f"w{i}"][0]) for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("call", ["pause", "begin_update", "receive_handles", "end_update", "weight_digests", "resume"])
def test_a_server_that_fails_anywhere_is_not_good_and_the_others_are(
    pair: list[FakeServer], model_folder: Path, call: str
) -> None:
    pair[0].fails = {call: 1}
    stream = iter(weights(0).items())
    result = make(pair, model_folder).send(stream, 0)
    assert list(result.good) == ["http://b:2"] and "refused" in result.failed["http://a:1"]
    assert pair[1].holds(weights(0)) and not pair[1].paused
    assert next(stream, None) is None


def test_a_server_that_failed_gets_the_next_weights(pair: list[FakeServer], model_folder: Path) -> None:
    pair[0].fails = {"receive_handles": 1}
    sync = make(pair, model_folder)
    sync.send(iter(weights(0).items()), 0)
    assert pair[0].version == -1 and pair[0].paused  # it answers nothing with half of the weights
    assert len(sync.send(iter(weights(1).items()), 1).good) == 2
    assert pair[0].holds(weights(1)) and not pair[0].paused


def test_an_absent_server_gets_no_further_calls(pair: list[FakeServer], model_folder: Path) -> None:
    pair[0].fails = {"info": 1}
    result = make(pair, model_folder).send(iter(weights(0).items()), 0)
    assert list(result.absent) == ["http://a:1"] and pair[0].calls == ["info"] and list(result.good) == ["http://b:2"]


def test_the_stream_is_consumed_when_no_server_is_left(pair: list[FakeServer], model_folder: Path) -> None:
    for server in pair:
        server.fails = {"receive_handles": 1}
    stream = iter(weights(0).items())
    result = make(pair, model_folder).send(stream, 0)
    assert not result.good and len(result.failed) == 2 and next(stream, None) is None


def test_servers_that_differ_are_found_where_digests_cannot_be_predicted(model_folder: Path) -> None:
    three = [FakeServer(f"{name}:1") for name in "abc"]
    for server in three:
        server.plain = False  # quantised, say
    three[1].corrupts = {"w3"}
    result = make(three, model_folder).send(iter(weights(0).items()), 0)
    assert result.good.keys() == {"http://a:1", "http://c:1"}
    assert result.failed["http://b:1"] == "its weights differ from those of the other servers: w3"
    # Of two nobody can say which one is wrong.
    assert not make(three[:2], model_folder).send(iter(weights(0).items()), 0).good
    # Another version of the engine may lay its weights out differently.
    three[1].engine_version = "2.0"
    assert len(make(three, model_folder).send(iter(weights(0).items()), 0).good) == 3


@pytest.mark.parametrize("method", ["ipc", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lie", ["ignores", "corrupts"])
def test_a_server_that_confirms_a_tensor_and_holds_another_is_named_at_that_sync(
    model_folder: Path, method: str, dtype: torch.dtype, lie: str
) -> None:
    server = FakeServer("a:1")
    sync = make([server], model_folder, dtype, method=method)
    assert sync.send(iter(weights(0).items()), 0).good
    setattr(server, lie, {"w2"})
    for version in (1, 1, 2):
        result = sync.send(iter(weights(version).items()), version)
        assert not result.good and result.failed["http://a:1"].startswith("w2: not what was sent")
        assert "(4 others are)" in result.failed["http://a:1"] and server.paused
    setattr(server, lie, set())
    result = sync.send(iter(weights(2).items()), 2)
    assert result.good and not result.notes and not server.paused


def test_a_server_that_ignores_everything_is_found_at_its_first_sync_also_where_norms_are_all_one(
    model_folder: Path,
) -> None:
    server = FakeServer("a:1")
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    norms = {f"model.layers.{i}.input_layernorm.weight": torch.ones(8) for i in range(2)}
    server.weights = {name: torch.randn(8, 8) for name in names} | norms
    server.ignores = {*names, *norms}
    new = {name: torch.randn(8, 8) for name in names} | norms
    sync = make([server], model_folder)
    for _ in range(2):
        assert names[0] in sync.send(iter(new.items()), 0).failed["http://a:1"]
    # A server that has these weights already is right, whatever it does with them.
    server.weights = dict(new)
    assert make([server], model_folder).send(iter(new.items()), 0).good


def test_reordered_tensors_are_proved_by_change_and_reported(
    model_folder: Path,
) -> None:
    server = FakeServer("a:1")
    names = [f"model.layers.{i}.mlp.experts.w2_weight" for i in range(2)]
    server.packs = set(names)

    def full(seed: int) -> dict[str, Tensor]:
        return {**weights(seed), **{name: torch.randn(4, 4) for name in names}}

    sync = make([server], model_folder)
    result = sync.send(iter(full(0).items()), 0)
    assert result.good and "model.layers.1.mlp.experts.w2_weight: kept by the server" in result.notes["http://a:1"]
    server.ignores = {names[1]}
    other = full(1)
    for _ in range(2):
        result = sync.send(iter(other.items()), 1)
        assert result.failed["http://a:1"].startswith(f"{names[1]}: not what was sent")
    # What is sent once more does not change.
    server.ignores = set()
    same = full(2)
    assert all(sync.send(iter(same.items()), version).good for version in (2, 3))
    # One that came back with its old weights has not what it had before.
    server.version, server.weights, server.ignores = -1, full(3), {names[0]}
    assert sync.send(iter(full(4).items()), 4).failed["http://a:1"].startswith(f"{names[0]}: not what was sent")
    # One that has the weights already need not change, where the other tensors show that it has them.
    server.version, server.weights, server.ignores = -1, same, set()
    result = make([server], model_folder).send(iter(same.items()), 2)
    assert result.good and f"{names[0]}, {names[1]}: not checked in this sync" in result.notes["http://a:1"]


def test_all_tensors_are_proved_every_n_syncs_and_in_a_retry_and_a_sample_in_between(
    pair: list[FakeServer], model_folder: Path
) -> None:
    def checked(sync: WeightSync, version: int) -> int:
        """Tensors whose digests were computed."""
        added = mock.patch.object(TensorDigests, "add", autospec=True, side_effect=TensorDigests.add)
        with added as adds:
            sync.send(iter(weights(version).items()), version)
        # What this test's servers compute of their own tensors is not counted.
        return len([call for call in adds.call_args_list if call.args[1]])

    sync = make(pair, model_folder, checksum_every=2)
    assert [checked(sync, version) for version in (0, 0, 1, 1, 2, 3)] == [5, 5, 1, 5, 5, 1]
    # A server that came back is new, so all get a full proof.
    pair[0].version = -1
    sync = make(pair, model_folder, checksum_every=3)
    assert [checked(sync, version) for version in (0, 1)] == [5, 1]
    pair[1].version = -1
    assert [checked(sync, version) for version in (2, 3, 4)] == [5, 5, 1]
    # Of packed tensors a sample could not show that they change.
    pair[0].packs = {"w1"}
    sync = make(pair, model_folder, checksum_every=9)
    assert [checked(sync, version) for version in (5, 6, 7)] == [5, 5, 5]
    assert checked(make(pair, model_folder, checksum_every=0), 9) == 0


@pytest.mark.parametrize(("packs_some", "expected"), [(False, [20, 3, 3, 3]), (True, [20, 20, 20, 20])])
def test_a_sample_is_of_all_tensors_and_needs_servers_that_use_each_as_it_was_sent(
    packs_some: bool, expected: list[int], model_folder: Path
) -> None:
    names = [f"model.layers.{i}.{kind}.weight" for i in range(10) for kind in ("self_attn.o_proj", "mlp.gate")]
    server = FakeServer("a:1")
    server.packs = {name for name in names if packs_some and "o_proj" in name}
    sync = make([server], model_folder, checksum_every=9)
    counts = []
    for version in range(4):
        generator = torch.Generator().manual_seed(version)
        sent = [(name, torch.randn(8, 8, generator=generator)) for name in names]
        with mock.patch.object(TensorDigests, "add", autospec=True, side_effect=TensorDigests.add) as adds:
            assert sync.send(iter(sent), version).good
        # What this test's server computes of its own tensors is not counted.
        counts.append(len([call for call in adds.call_args_list if call.args[1]]))
    assert counts == expected


def test_a_frozen_server_costs_its_full_timeout_once(
    pair: list[FakeServer], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, sync = pair[0], make(pair, model_folder)
    frozen.frozen = True
    limits: list[float] = []
    read_info = weight_sync.request_info

    def noted(server: Any, seconds: float) -> Any:
        """Note the limit of the frozen server, and let it end at once."""
        if server is frozen and frozen.frozen:
            limits.append(seconds)
            seconds = 0.05
        return read_info(server, seconds)

    monkeypatch.setattr(weight_sync, "request_info", noted)

    def send(version: int) -> None:
        result = sync.send(iter(weights(version).items()), version)
        assert list(result.good) == ["http://b:2"] and list(result.absent) == ["http://a:1"]

    send(0)
    send(0)  # another attempt of the same sync
    assert limits == [weight_sync.INFO_SECONDS]
    send(1)
    assert limits == [weight_sync.INFO_SECONDS, weight_sync.ABSENT_INFO_SECONDS] and limits[1] < limits[0]
    frozen.frozen = False
    assert len(sync.send(iter(weights(2).items()), 2).good) == 2 and frozen.holds(weights(2))


def test_the_core_runs_on_any_event_loop_and_starts_no_thread(pair: list[FakeServer], model_folder: Path) -> None:
    threads = threading.active_count()
    result = asyncio.run(make(pair, model_folder).send_async(iter(weights(0).items()), 0))
    assert len(result.good) == 2 and threading.active_count() == threads


def test_only_the_last_versions_stay_on_disk(pair: list[FakeServer], model_folder: Path) -> None:
    sync = make(pair, model_folder, method="disk")
    for version in range(4):
        sync.send(iter(weights(version).items()), version)
    assert sorted(p.name for p in (model_folder.parent / "weights").iterdir()) == ["version_000002", "version_000003"]


def test_a_disk_that_cannot_be_written_is_a_failure_that_names_the_folder(
    pair: list[FakeServer], model_folder: Path
) -> None:
    (model_folder.parent / "weights").write_text("a file")
    result = make(pair, model_folder, method="disk").send(iter(weights(0).items()), 0)
    assert not result.good and "could not be written to" in result.failed["http://a:1"]


def test_an_address_of_another_machine_is_named(pair: list[FakeServer], model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_sync.host = '192.0.2.1'"):
        make(pair, model_folder, method="distributed", host="192.0.2.1").send(iter(weights(0).items()), 0)


def test_a_tied_output_layer_is_sent_under_its_own_name_too(pair: list[FakeServer], model_folder: Path) -> None:
    tied = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)}
    config = WeightSyncConfig(method="ipc")
    owners = {server.url: [0] for server in pair}
    sync = WeightSync(
        pair,  # type: ignore[arg-type]
        config,
        model_folder=model_folder,
        weights_folder=model_folder.parent,
        dtype=torch.float32,
        device=CPU,
        tied=True,
        sharing=MemorySharing(owners, 2**20, torch.float32, tied=True, group=None),
    )
    sync.send(iter(tied.items()), 0)
    assert pair[0].holds({**tied, "lm_head.weight": tied["model.embed_tokens.weight"]})
