"""A real server that confirms a weight update and loads nothing, half of it or older weights, by every method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.sglang import SGLangServer
from tests.e2e.runs import records, train
from tests.engines.inprocess import make_model
from tests.engines.runs import from_model
from tests.engines.servers import Engine, start_lying_sglang, stop_engine, wait_ready
from tests.engines.tiny import Reference

LIES = ("nothing", "half", "older")


@pytest.fixture(scope="module")
def lie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what the server loads."""
    return tmp_path_factory.mktemp("lie") / "lie"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "usual", seed=0, sharpness=5.0)


@pytest.fixture(scope="module")
def engine(model: Path, lie: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("lying") / "log"
    started = start_lying_sglang(model, log, lie, "--enable-return-routed-experts")
    try:
        yield wait_ready(started)
    finally:
        stop_engine(started)


@pytest.mark.parametrize("method", ["distributed", "ipc", "disk"])
def test_a_sync_names_the_tensors_that_a_server_did_not_load(
    method: str, engine: Engine, lie: Path, model: Path, tmp_path: Path
) -> None:
    reference = Reference(model)
    client: Any = SGLangServer(engine.url)
    sharing = None
    if method == "ipc":
        sharing = MemorySharing({client.url: [0]}, 2**20, torch.float32, tied=False, group=None)
    sync = WeightSync(
        [client],
        WeightSyncConfig(method=method, timeout_seconds=60),  # type: ignore[arg-type]
        model_folder=model,
        weights_folder=tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        sharing=sharing,
    )

    def send(version: int) -> Any:
        return sync.send(iter([(name, weight * (1 + version / 8)) for name, weight in reference.weights()]), version)

    try:
        assert send(1).good
        for version, said in enumerate(LIES, 2):
            lie.write_text(said)
            lied = send(version)
            lie.write_text("")
            (complaint,) = lied.failed.values()
            assert not lied.good and "not what was sent" in complaint, complaint
            # Every tensor changes with the version.
            assert ("(0 others are)" in complaint) == (said != "half"), complaint
            mended = send(version)
            assert mended.good and not mended.notes
    finally:
        lie.write_text("")
        sync.close()


@pytest.mark.long
@pytest.mark.parametrize("method", ["distributed", "ipc", "disk"])
def test_a_run_stops_before_it_trains_on_tokens_of_weights_that_were_not_loaded(
    method: str, engine: Engine, lie: Path, model: Path, tmp_path: Path
) -> None:
    """The first sync sends what the server has already, so that no lie is one. The second one has the first update."""
    lie.write_text("older")
    # With a signal in every group: the weights change with the first update.
    (tmp_path / "score.py").write_text(
        "def score(prompt, completion, label):\n    return sum(map(ord, completion)) % 7.0\n"
    )
    more = {
        "run__num_steps": 3,
        "rollout__weight_sync__method": method,
        "reward__function": f"{tmp_path}/score.py:score",
    }
    result = train(from_model([engine], model, tmp_path / "run", "fp32", **more))
    lie.write_text("")
    text = result.stdout + result.stderr
    assert result.returncode == 2 and "no inference server has the weights of version 1" in text, text
    assert "not what was sent, by the server's own checksum of its weights (0 others are)" in text, text
    # The record of a step comes after its sync.
    assert not [record["step"] for record in records(tmp_path / "run") if record["step"] > 0], text
