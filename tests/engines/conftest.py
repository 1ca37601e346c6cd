"""Models and servers that the tests share; a server is started once, by the first test that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.calls import call
from tests.engines.servers import Engine, start_sglang, start_vllm, stop_engine, wait_ready
from tests.engines.tiny import Reference, make_tiny

_HERE = Path(__file__).parent
SGLANG_VERSIONS = ("0.5.23", "0.5.20")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs real servers."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("engines")


@pytest.fixture(scope="session")
def old_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The weights that servers start with."""
    return Reference(make_tiny(tmp_path_factory.mktemp("models") / "old", seed=0))


@pytest.fixture(scope="session")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The weights that servers get."""
    return Reference(make_tiny(tmp_path_factory.mktemp("models") / "new", seed=1))


def with_weights_of(engine: Engine, model: Reference) -> Engine:
    """The server as if nobody had used it: a test before may have given it other weights, with a version of its own."""
    if call(engine, lambda server: server.info()).policy_version != -1:
        call(engine, lambda server: server.update_from_disk(str(model.folder), -1))
    return engine


@pytest.fixture(scope="session", params=SGLANG_VERSIONS)
def sglang_server(
    request: pytest.FixtureRequest, old_model: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One of each supported version."""
    log = tmp_path_factory.mktemp("sglang") / "log"
    engine = start_sglang(old_model.folder, log, "--enable-return-routed-experts", version=request.param)
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)


@pytest.fixture
def sglang(sglang_server: Engine, old_model: Reference) -> Engine:
    """A server of each supported version of SGLang, with the old weights."""
    return with_weights_of(sglang_server, old_model)


@pytest.fixture(scope="session")
def vllm_server(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One as it should be started."""
    engine = start_vllm(old_model.folder, tmp_path_factory.mktemp("vllm") / "log")
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)


@pytest.fixture
def vllm(vllm_server: Engine, old_model: Reference) -> Engine:
    """A server as it should be started, with the old weights."""
    return with_weights_of(vllm_server, old_model)


@pytest.fixture(scope="session")
def plain_vllm(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Without our extension, and with vLLM's own kind of log-probabilities."""
    engine = start_vllm(
        old_model.folder,
        tmp_path_factory.mktemp("vllm") / "plain",
        *("--worker-extension-cls", "", "--weight-transfer-config", '{"backend": "nccl"}'),
        *("--logprobs-mode", "raw_logprobs", "--max-logprobs", "20"),
    )
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)
