"""Whether warmed-up weights are those of this run: only a marker that can be read says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.errors import CheckpointError
from megatron_dppo.run.warmup import MARKER, is_warm, mark_warm
from tests.unit import configs


def test_weights_count_for_exactly_the_warm_up_that_made_them(tmp_path: Path) -> None:
    config = configs.config(run={"output_dir": str(tmp_path)})
    assert not is_warm(tmp_path, config)
    mark_warm(tmp_path, config)
    assert is_warm(tmp_path, config)
    assert not is_warm(tmp_path, configs.config(run={"output_dir": str(tmp_path), "seed": 5}))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"other": 1}', b"3", b"\xff\xfe"])
def test_a_damaged_marker_is_an_error_and_no_fresh_warm_up(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{MARKER} cannot be read .*delete {tmp_path} to warm up again"):
        is_warm(tmp_path, configs.config(run={"output_dir": str(tmp_path)}))
