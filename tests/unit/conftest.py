"""Settings of the unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import tests.shims  # noqa: F401

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def launcher_variables() -> Iterator[None]:
    """Undo what a test makes this process: a rank of a job, as which libraries of later tests would take it."""
    before = {name: os.environ.get(name) for name in _LAUNCHER}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    assert not dist.is_initialized(), "the test left its process group"
