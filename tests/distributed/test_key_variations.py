"""Keys of config.json with other values: equal to transformers in float64, or refused. CI takes some of them."""

from __future__ import annotations

import pytest

from tests.distributed.families import TINY
from tests.distributed.key_variations import run
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def test_some_keys_are_equal_or_refused() -> None:
    run_distributed(run, 1, ["olmoe", "minimax_m2", "glm4_moe_lite"], 7)


@pytest.mark.long
@pytest.mark.parametrize("family", TINY)
def test_every_key_is_equal_or_refused(family: str) -> None:
    run_distributed(run, 1, [family], 1, timeout=1200.0)
