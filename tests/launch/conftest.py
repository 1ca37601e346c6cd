"""One Slurm for all tests of the folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm import Slurm


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster without jobs: those of a test that failed do not stand in the next one's way."""
    yield cluster
    cluster.cancel_all()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    """Three nodes, and two with GPUs; not in pytest's folder, whose path is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        cluster = Slurm(Path(folder), num_nodes=3, num_gpu_nodes=2)
        try:
            yield cluster
        finally:
            cluster.stop()
