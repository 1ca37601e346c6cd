"""Output of scoring processes: all of a little, and a limited part of much."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron_dppo.rewards import RewardItem, RewardScorer

FUNCTION = """
import os, subprocess, sys

def score(prompt, completion, label):
    if completion == "quiet":
        print("one line")
        print("an error", file=sys.stderr)
    elif completion == "print":
        for _ in range(30_000):
            print("x" * 99)
    elif completion == "write":
        os.write(2, b"y" * 3_000_000)
    else:
        subprocess.run(["head", "-c", "3000000", "/dev/zero"], check=True)
    return float(len(completion))
"""


def test_output_is_passed_on_up_to_a_limit_and_changes_no_reward(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "noisy.py"
    file.write_text(FUNCTION)
    kinds = ["quiet", "print", "write", "child"]
    items = [RewardItem(prompt="", completion=kind, label="", metadata={}, token_ids=(1,)) for kind in kinds]
    scorer = RewardScorer(f"{file}:score", 60.0, 1)
    try:
        for is_first in (True, False):
            results = scorer.score(items, is_batch=True)
            assert [result.reward for result in results] == [5.0, 5.0, 5.0, 5.0]
            out, err = _drain(capfd)
            # Each stream is passed on in its order, whatever comes late; our own warning may come between.
            theirs = re.sub(r"\n?warning  rewards:.*\n", "", err)
            assert not is_first or (out.startswith("one line\n") and theirs.startswith("an error\n"))
            assert out.count("x" * 99) > 100 and err.count("y") > 1000
            assert len(out) + len(err) < 2 * 4 * (16 << 10) + 1000
            assert err.count("left out in this step") == 1
    finally:
        scorer.close()


def _drain(capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """All output, once nothing more has come for two seconds."""
    out = err = ""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        more_out, more_err = capfd.readouterr()
        if more_out or more_err:
            end = time.monotonic() + 2
        out, err = out + more_out, err + more_err
        time.sleep(0.1)
    return out, err
