"""The note of a resume about steps that ``metrics.jsonl`` lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_dppo.report.records import missing_records


@pytest.mark.parametrize(
    ("recorded", "step", "words"),
    [
        ([0, 1, 2, 3], 3, ""),
        # An evaluation beside training has a record of its own.
        ([0, 1, 2, 2, 3], 3, ""),
        # Without an evaluation before the first step.
        ([1, 2, 3], 3, ""),
        # Steps after the checkpoint are trained again.
        ([0, 1, 2, 3, 4, 5], 3, ""),
        ([], 0, ""),
        (None, 3, "3 steps up to step 3, from step 1 on"),
        ([], 3, "3 steps up to step 3, from step 1 on"),
        ([0, 1, 2], 5, "3 steps up to step 5, from step 3 on"),
        ([0, 3, 4, 5], 5, "2 steps up to step 5, from step 1 on"),
        ([0, 1, 2, 4, 5, 7], 7, "2 steps up to step 7, from step 3 on"),
    ],
)
def test_a_resume_names_the_steps_without_a_record(
    recorded: Sequence[int] | None, step: int, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    if recorded is not None:
        file.write_text("".join(json.dumps({"step": each}) + "\n" for each in recorded))
    note = missing_records(tmp_path, step)
    assert note == "" if not words else note.startswith(f"warning  {file} has no record of {words}: "), note
