"""The page of metrics names what a run writes."""

from __future__ import annotations

import runpy
from pathlib import Path

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


ROOT = Path(__file__).parents[2]
DRAW = runpy.run_path(str(ROOT / "tools/draw_metrics.py"))


def test_every_metric_with_a_picture_has_a_row_and_a_file() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert not undocumented(dict.fromkeys(DRAW["METRICS"], 1.0))
    for metric in DRAW["METRICS"]:
        name = DRAW["file_name"](metric)
        assert f"| `{metric}` | ![" in page and f"](metrics/{name}) |" in page
        assert f"<title>{metric} over 40 steps</title>" in (ROOT / "docs/metrics" / name).read_text(encoding="utf-8")
    assert len(list((ROOT / "docs/metrics").iterdir())) == len(DRAW["METRICS"])


def test_a_picture_has_its_points_where_the_axis_says() -> None:
    """Two steps of 4: x is 48 + 204 step / 4, y is 88 for 0 and 8 for the largest value 10."""
    runs = [[{"step": 0, "m": 0.0}, {"step": 2, "m": 10.0}], [{"step": 4, "m": 5.0}, {"step": 5}], [{"step": 1}]]
    text = DRAW["picture"](runs, "m")
    assert 'd="M48.0 88.0L150.0 8.0"' in text and 'd="M252.0 48.0"' in text and ">10</text>" in text
    with pytest.raises(ValueError, match="got 'n'"):
        DRAW["picture"](runs, "n")
