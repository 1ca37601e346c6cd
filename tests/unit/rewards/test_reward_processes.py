"""Threads and processes that a reward function starts, with each start method, and a module beside its file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.scorer import RewardScorer

FUNCTION = """
import concurrent.futures
import multiprocessing

import halves_beside


def half(value):
    return value / 2 + halves_beside.NOTHING


def into(queue):
    queue.put(half(6))


def score(completion, label, metadata, **_):
    method = metadata["method"]
    context = multiprocessing if method == "default" else multiprocessing.get_context(method)
    if metadata["kind"] == "threads":
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            return sum(executor.map(half, [1, 2, 3]))
    if metadata["kind"] == "Process":
        queue = context.Queue()
        process = context.Process(target=into, args=(queue,))
        process.start()
        value = queue.get()
        process.join()
        return value
    if metadata["kind"] == "Pool":
        with context.Pool(2) as pool:
            return sum(pool.map(half, [1, 2, 3]))
    if metadata["kind"] == "start method":
        return ["fork", "spawn", "forkserver"].index(context.get_start_method())
    chosen = {} if method == "default" else {"mp_context": context}
    with concurrent.futures.ProcessPoolExecutor(2, **chosen) as executor:
        return sum(executor.map(half, [1, 2, 3]))
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardScorer]:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "mine.py").write_text(FUNCTION)
    (folder / "halves_beside.py").write_text("NOTHING = 0\n")
    scorer = RewardScorer(f"{folder}/mine.py:score", 60.0, 1)
    yield scorer
    scorer.close()


def result(scorer: RewardScorer, kind: str, method: str) -> tuple[float, str]:
    item = RewardItem(prompt="", completion="", label="", metadata={"kind": kind, "method": method})
    (scored,) = scorer.score([item])
    return scored.reward, scored.error


@pytest.mark.parametrize("method", ["default", "fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["Process", "Pool", "ProcessPoolExecutor"])
def test_a_function_of_the_file_runs_in_processes(scorer: RewardScorer, kind: str, method: str) -> None:
    assert result(scorer, kind, method) == (3.0, "")


def test_a_function_of_the_file_runs_in_threads(scorer: RewardScorer) -> None:
    assert result(scorer, "threads", "default") == (3.0, "")


def test_the_default_start_method_is_that_of_python(scorer: RewardScorer, tmp_path: Path) -> None:
    """The scoring process itself is spawned, which would make its children spawned ones."""
    default = multiprocessing.get_all_start_methods()[0]
    expected = ["fork", "spawn", "forkserver"].index(default)
    assert result(scorer, "start method", "default") == (float(expected), "")
