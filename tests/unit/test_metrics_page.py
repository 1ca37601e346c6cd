"""The page of metrics names what a run writes."""

from __future__ import annotations

import pytest

from tests.metrics_page import documented, undocumented


def test_the_page_has_rows_for_every_part() -> None:
    parts = {name.split("/")[0] for name in documented()}
    assert parts == {"train", "rollout", "eval", "perf"} and len(documented()) > 70


@pytest.mark.parametrize("name", ["train/los", "rollout/finish/", "perf/steps", "other/name", "eval/pass_at_x"])
def test_a_name_that_it_does_not_have_is_found(name: str) -> None:
    assert undocumented({name: 1.0, "step": 3}) == {name}


@pytest.mark.parametrize("name", ["train/counterfactual/grpo/cosine", "eval/pass_at_4", "rollout/reward/format"])
def test_a_placeholder_stands_for_any_name(name: str) -> None:
    assert not undocumented({name: 1.0})
