"""What one rank finds before the start stops all of them, with its name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.errors import ConfigError, SeveralProblems
from megatron_dppo.run.preflight import Start, require_inputs
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def check(rank: int, world_size: int) -> None:
    inputs: Any = object()
    start = Start(None, world_size, rank, inputs=inputs)  # type: ignore[arg-type]
    assert require_inputs(start, []) is inputs
    with pytest.raises(ConfigError, match=r"^\[rank 1\] the data are not here$") as one:
        require_inputs(start, [ConfigError("the data are not here")] if rank == 1 else [])
    assert one.value.on_every_rank
    with pytest.raises(ConfigError, match=r"^both$"):
        require_inputs(start, [ConfigError("both")])
    alone = {0: "the folder is a file", 1: "the data are not here"}
    with pytest.raises(SeveralProblems) as several:
        require_inputs(start, [ConfigError("both"), ConfigError(alone[rank])])
    assert [str(e) for e in several.value.errors] == ["both", alone[0], f"[rank 1] {alone[1]}"]


def test_every_rank_raises_what_any_of_them_found() -> None:
    run_distributed(check, 2)
