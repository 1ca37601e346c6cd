"""The time limit of a reward is the time of the function alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.rewards import RewardItem, RewardScorer

FUNCTIONS = """
import os, time

class Slow:
    def __reduce__(self):
        return read_slowly, ()

def read_slowly():
    time.sleep(1.5)
    return "read"

def quick(*, completion, label, metadata):
    return float(metadata["value"] == "read")

def crowded(*, completion, label):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.process_time()
    while time.process_time() - start < 0.5:
        pass
    return 1.0

def endless(*, completion, label):
    while True:
        pass
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "limit_functions.py"
    file.write_text(FUNCTIONS)
    # Also importable by name, so that a sample can hold an object of it.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return file


def score(function: str, metadata: dict[str, object]) -> tuple[float, str]:
    scorer = RewardScorer(function, timeout_seconds=1.0, num_workers=1)
    try:
        result = scorer.score([RewardItem(prompt="", completion="a", label="b", metadata=metadata)])[0]
    finally:
        scorer.close()
    return result.reward, result.error


def test_reading_a_sample_is_not_charged_to_the_function(functions: Path) -> None:
    import limit_functions

    assert score(f"{functions}:quick", {"value": limit_functions.Slow()}) == (1.0, "")


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")
def test_waiting_for_a_cpu_is_not_charged_to_the_function(functions: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(4)]
    try:
        assert score(f"{functions}:crowded", {}) == (1.0, "")
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_function_that_never_returns_is_still_stopped(functions: Path) -> None:
    reward, error = score(f"{functions}:endless", {})
    assert (reward, error) == (0.0, "took longer than reward.timeout_seconds = 1 and was stopped")
