"""A disk that fills while a run goes on: one line, and the checkpoint before it is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import command, environment, flags, train

pytestmark = pytest.mark.e2e

LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_checkpoint_that_cannot_be_written_ends_in_one_line_and_the_older_one_is_continued(
    short_run: list[str], tmp_path: Path
) -> None:
    first = train([*short_run, *flags(checkpoint__export_hf="false")])
    assert first.returncode == 0, first.stderr
    older = tmp_path / "run/checkpoints/step_000002"
    size = max(file.stat().st_size for file in older.iterdir())
    longer = [*short_run, *flags(checkpoint__export_hf="false", checkpoint__accept_changes="true", run__num_steps=3)]
    limited = [sys.executable, "-c", LIMITED, str(size // 2), *command(longer, 1)]
    failed = subprocess.run(limited, env=environment(), capture_output=True, text=True, timeout=420, check=False)
    assert failed.returncode == 2, failed.stderr
    assert "error: the checkpoint of step 3 cannot be written to" in failed.stderr and "free" in failed.stderr
    assert "Traceback" not in failed.stderr and older.is_dir()
    second = train(longer)
    assert second.returncode == 0 and "step_000002 (step 2" in second.stdout, second.stderr
