"""Models and servers that the tests share; a server is started once, by the first test that needs it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from megatron_dppo.process.orphans import no_orphans
from megatron_dppo_engines.serving.collectives import TESTED
from tests.engines.calls import call
from tests.engines.servers import Engine, SharedEngine, start_sglang, start_vllm
from tests.engines.tiny import Reference, make_tiny

_HERE = Path(__file__).parent
SGLANG_VERSIONS = (TESTED["sglang_newest"], TESTED["sglang"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need real servers; a third of those of the older SGLang runs without ``EVERYTHING``."""
    engine_tests = [item for item in items if _HERE in item.path.parents]
    for item in engine_tests:
        item.add_marker("engines")
    for index, item in enumerate(item for item in engine_tests if SGLANG_VERSIONS[1] in item.name):
        if index % 3:
            item.add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def servers_end_with_the_tests() -> Iterator[None]:
    """Stop servers however the tests end: servers run in separate sessions."""
    with no_orphans():
        yield


@pytest.fixture(scope="session")
def old_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the weights that servers start with."""
    return Reference(make_tiny(tmp_path_factory.mktemp("models") / "old", seed=0))


@pytest.fixture(scope="session")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the weights that servers are updated to."""
    return Reference(make_tiny(tmp_path_factory.mktemp("models") / "new", seed=1))


def load_initial_weights(engine: Engine, model: Reference) -> Engine:
    """Restore the initial weights: an earlier test may have loaded other weights with another version."""
    if call(engine, lambda server: server.info()).policy_version != -1:
        call(engine, lambda server: server.update_from_disk(str(model.folder), -1))
    return engine


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which tests failed, for the fixtures that come down after them."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


def lent(shared: SharedEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The server for one test; nobody knows in what state a failed one left it, so that the next gets another."""
    yield shared.engine()
    if request.node.stash.get(_FAILED, False):
        shared.stop()


@pytest.fixture(scope="session", params=SGLANG_VERSIONS)
def shared_sglang(
    request: pytest.FixtureRequest, old_model: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedEngine]:
    """One of each supported version."""
    log = tmp_path_factory.mktemp("sglang") / "log"
    options = ("--enable-return-routed-experts",)
    with SharedEngine(lambda: start_sglang(old_model.folder, log, *options, version=request.param)) as shared:
        yield shared


@pytest.fixture
def sglang_server(shared_sglang: SharedEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A server of each supported version of SGLang, with whatever weights it has."""
    yield from lent(shared_sglang, request)


@pytest.fixture
def sglang(sglang_server: Engine, old_model: Reference) -> Engine:
    """A server of each supported version of SGLang, with the old weights."""
    return load_initial_weights(sglang_server, old_model)


@pytest.fixture(scope="session")
def shared_sglang_bf16(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """One in bf16."""
    log = tmp_path_factory.mktemp("bf16") / "log"
    with SharedEngine(lambda: start_sglang(old_model.folder, log, "--dtype", "bfloat16")) as shared:
        yield shared


@pytest.fixture
def sglang_bf16(shared_sglang_bf16: SharedEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """SGLang in bf16, with whatever weights it has."""
    yield from lent(shared_sglang_bf16, request)


@pytest.fixture(scope="session")
def shared_vllm(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """One as it should be started."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with SharedEngine(lambda: start_vllm(old_model.folder, log)) as shared:
        yield shared


@pytest.fixture
def vllm_server(shared_vllm: SharedEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A server as it should be started, with whatever weights it has."""
    yield from lent(shared_vllm, request)


@pytest.fixture
def vllm(vllm_server: Engine, old_model: Reference) -> Engine:
    """A server as it should be started, with the old weights."""
    return load_initial_weights(vllm_server, old_model)


@pytest.fixture(scope="session")
def shared_plain_vllm(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """Without our extension, and with vLLM's own kind of log-probabilities."""
    log = tmp_path_factory.mktemp("vllm") / "plain"
    options = ("--worker-extension-cls", "", "--weight-transfer-config", '{"backend": "nccl"}')
    options += ("--logprobs-mode", "raw_logprobs", "--max-logprobs", "20")
    with SharedEngine(lambda: start_vllm(old_model.folder, log, *options)) as shared:
        yield shared


@pytest.fixture
def plain_vllm(shared_plain_vllm: SharedEngine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A server without our extension."""
    yield from lent(shared_plain_vllm, request)
