"""Settings that every test process, and every process that a test starts, shares."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xdist.scheduler import LoadFileScheduling

    from tests.unit.scripted import World

# Several ranks share the cores of one machine; more threads each make them many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Megatron warns in every process about optional packages that it does not find.
os.environ.setdefault("PYTHONWARNINGS", "ignore")

# Under nohup, or in the background of a script, signals are ignored, and a child inherits that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long``: ``make test-long`` runs it."""
    if os.environ.get("EVERYTHING"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Give each file to one worker, and all whole runs to the same one: they share a run."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    return Scheduling(config, log)


@pytest.fixture
def tokenizer() -> Any:
    """One token a byte, and ChatML."""
    from tests.unit.scripted import chat_tokenizer

    return chat_tokenizer()


@pytest.fixture
def world(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A scripted engine for the tests of agents."""
    from tests.unit.scripted import World

    with closing(World(tokenizer, monkeypatch)) as made:
        yield made
