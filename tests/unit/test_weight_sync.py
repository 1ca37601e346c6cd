"""New weights to several servers: order, buckets, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.config import WeightSyncConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.weight_sync import WeightSync
from tests.unit.weight_server import FakeServer

CPU = torch.device("cpu")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def pair() -> list[FakeServer]:
    return [FakeServer("a:1"), FakeServer("b:2")]


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(300, 1000, generator=generator) for i in range(5)}


def make(servers: list[FakeServer], folder: Path, dtype: torch.dtype = torch.float32, **keys: object) -> WeightSync:
    config = WeightSyncConfig(**{"method": "tensor", "bucket_megabytes": 2, **keys})  # type: ignore[arg-type]
    place = folder.parent / "weights"
    return WeightSync(servers, config, model_folder=folder, weights_folder=place, dtype=dtype, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["tensor", "disk"])
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
    assert pair[0].calls.count("receive_tensors") == 5  # 1.2 MB each: no two fit into 2 MiB
    pair[0].calls.clear()
    make(pair, model_folder, torch.bfloat16).send(iter(weights(0).items()), 0)
    assert pair[0].calls.count("receive_tensors") == 2  # 0.6 MB each: three and two
    assert pair[0].weights["w0"].dtype == torch.bfloat16


def test_a_stream_that_goes_on_in_the_same_memory_is_sent_as_it_was(pair: list[FakeServer], model_folder: Path) -> None:
    def reusing() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    make(pair, model_folder).send(reusing(), 0)
    assert [float(pair[1].weights[f"w{i}"][0]) for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("call", ["pause", "begin_update", "receive_tensors", "end_update", "checksum", "resume"])
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
    pair[0].fails = {"receive_tensors": 1}
    sync = make(pair, model_folder)
    sync.send(iter(weights(0).items()), 0)
    assert pair[0].version == -1 and pair[0].paused  # it answers nothing with half of the weights
    assert len(sync.send(iter(weights(1).items()), 1).good) == 2
    assert pair[0].holds(weights(1)) and not pair[0].paused


def test_a_server_that_is_not_there_is_left_alone(pair: list[FakeServer], model_folder: Path) -> None:
    pair[0].fails = {"info": 1}
    result = make(pair, model_folder).send(iter(weights(0).items()), 0)
    assert list(result.absent) == ["http://a:1"] and pair[0].calls == ["info"] and list(result.good) == ["http://b:2"]


def test_the_stream_is_taken_to_its_end_when_nobody_is_left(pair: list[FakeServer], model_folder: Path) -> None:
    for server in pair:
        server.fails = {"receive_tensors": 1}
    stream = iter(weights(0).items())
    result = make(pair, model_folder).send(stream, 0)
    assert not result.good and len(result.failed) == 2 and next(stream, None) is None


def test_servers_whose_weights_differ_are_found(model_folder: Path) -> None:
    three = [FakeServer(f"{name}:1") for name in "abc"]
    three[1].corrupts = True
    result = make(three, model_folder).send(iter(weights(0).items()), 0)
    assert result.good.keys() == {"http://a:1", "http://c:1"} and "differ" in result.failed["http://b:1"]
    # Of two nobody can say which one is wrong.
    assert not make(three[:2], model_folder).send(iter(weights(0).items()), 0).good
    # Another version of the engine may lay its weights out differently.
    three[1].engine_version = "2.0"
    assert len(make(three, model_folder).send(iter(weights(0).items()), 0).good) == 3


def test_the_checksums_are_compared_as_often_as_asked(pair: list[FakeServer], model_folder: Path) -> None:
    sync = make(pair, model_folder, checksum_every=2)
    for version in range(4):
        sync.send(iter(weights(0).items()), version)
    assert pair[0].calls.count("checksum") == 2
    make(pair, model_folder, checksum_every=0).send(iter(weights(0).items()), 9)
    assert pair[0].calls.count("checksum") == 2


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
    with pytest.raises(ConfigError, match=r"weight_sync.host = '192.0.2.1' is no address of this machine"):
        make(pair, model_folder, method="distributed", host="192.0.2.1").send(iter(weights(0).items()), 0)


def test_a_tied_output_layer_is_sent_under_its_own_name_too(pair: list[FakeServer], model_folder: Path) -> None:
    tied = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)}
    config = WeightSyncConfig(method="tensor")
    sync = WeightSync(
        pair,  # type: ignore[arg-type]
        config,
        model_folder=model_folder,
        weights_folder=model_folder.parent,
        dtype=torch.float32,
        device=CPU,
        tied=True,
    )
    sync.send(iter(tied.items()), 0)
    assert pair[0].holds({**tied, "lm_head.weight": tied["model.embed_tokens.weight"]})
