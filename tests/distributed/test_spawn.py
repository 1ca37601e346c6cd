"""The helper that starts real processes."""

from __future__ import annotations

import time

import pytest

from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("the child's own words")


def sleep_for_a_minute(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_a_failing_process_reports_its_traceback() -> None:
    with pytest.raises(Exception, match=r"fail_on_rank_one[\s\S]*the child's own words"):
        run_distributed(fail_on_rank_one, 2, timeout=60)


def test_processes_that_hang_are_ended_at_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="sleep_for_a_minute on 1 processes"):
        run_distributed(sleep_for_a_minute, 1, timeout=3)
    assert time.monotonic() - start < 20
