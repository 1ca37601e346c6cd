"""``tools/write_question_pages.py`` on made-up rows: whole, unfinished and missing runs, and a broken page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiment_rows import row_of
from megatron_dppo.errors import UserError
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.store import Store
from megatron_dppo_lab.third_edition import THIRD_EDITION
from tools import write_question_pages

BINARY, TOPK, CENTERED = "dppo_binary_tv tuned", "dppo_topk_tv tuned", "dppo_binary_tv centered tuned"
PAGE = "before\n<!-- table {name} -->\nold\n<!-- end of table -->\nafter\n"


def reward_of(run: GridRun, report: dict[str, float]) -> float:
    """The second candidate is the best; in the report the seed adds to the loss's reward."""
    if run.phase == "search":
        return 0.75 if run.candidate == 1 else 0.25
    return report[run.loss] + 0.01 * run.seed


def store_of(folder: Path) -> Path:
    """The search of the first block, all seeds of Binary and Top-K, and three of centered DPPO, where it is stale."""
    store = Store(folder)
    stage = THIRD_EDITION.stages(quick=False)[0]
    search = stage.search(quick=False)
    report = {BINARY: 0.5, TOPK: 0.4, CENTERED: 0.5, "drpo/12.5": 0.1}

    def add(runs: list[GridRun]) -> dict[str, dict[str, object]]:
        rows = {}
        for run in runs:
            rewards = [reward_of(run, report)] * run.settings["run"]["num_steps"]
            curves = {"rollout/reward": rewards, "train/mask_fraction": [0.125]}
            rows[run.key] = row_of(run, store, curves=curves, cpu_seconds=20.0 if "topk" in run.loss else 10.0)
        store.add(rows, runs)
        return rows

    searched = add(search)
    limits = {BINARY: 12, TOPK: 12, CENTERED: 3, "drpo/12.5": 0}
    add([run for run in stage.report(False, None, searched.values()) if run.seed < limits[run.loss]])
    return folder


def written(tmp_path: Path, name: str, *arguments: str) -> str:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(name=name))
    write_question_pages.main([str(tmp_path / "store"), "--page", str(page), *arguments])
    return page.read_text()


def test_tables_have_bands_and_what_is_unfinished(tmp_path: Path) -> None:
    store_of(tmp_path / "store")
    text = written(tmp_path, "mismatch-bands")
    assert text.startswith("before\n<!-- table mismatch-bands -->\n\n|")
    assert text.endswith("<!-- end of table -->\nafter\n") and "old" not in text
    mean = 0.5 + 0.01 * 5.5
    assert f"| rare_words, staleness 8 | `{BINARY}` | {mean:.3f} [0.500, 0.610] | 12.5% | 12 |" in text
    assert f"| rare_words, staleness 8 | `{CENTERED}` | 0.510 [0.500, 0.520] | 12.5% | 3 of 12 |" in text
    # A preset with the settings that the search chose is the same run.
    assert "`dppo_binary_tv 0.15`" in written(tmp_path, "delta-bands")


def test_a_loss_whose_search_is_unfinished_has_no_rows_and_other_tables_stay(tmp_path: Path) -> None:
    folder = store_of(tmp_path / "store")
    search = THIRD_EDITION.stages(quick=False)[0].search(quick=False)
    # The last candidate of Top-K on one seed: the other seven runs may have chosen another setting.
    last = [run for run in search if run.loss == TOPK][-1]
    Store(folder).row(last).unlink()
    results = write_question_pages.Results.read(folder)
    compared = {each.claim.text: each for each, _ in results.comparisons if each.mismatch == "staleness 8"}
    topk = compared["Top-K TV is better than Binary TV"]
    assert not topk.differences and len(topk.seeds) == 12
    assert not [row for row in results.rows if row["loss"] == TOPK]
    assert len(results.cell("rare_words", "staleness 8", BINARY)) == 12
    assert "old" in written(tmp_path, "masked-tokens"), "it needs --runs"


def test_wrong_stores_pages_and_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no rows"):
        write_question_pages.main([str(tmp_path)])
    store_of(tmp_path / "store")
    with pytest.raises(UserError, match="unknown table 'other'"):
        written(tmp_path, "other")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="no recorded tokens"):
        written(tmp_path, "masked-tokens", "--runs", str(tmp_path / "run"))
    broken = next((tmp_path / "store/rows").iterdir())
    broken.write_text(json.dumps({"key": 1}))
    with pytest.raises(UserError, match=broken.name):
        written(tmp_path, "delta-bands")


def test_every_marker_of_the_page_is_a_table() -> None:
    text = write_question_pages.PAGE.read_text()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("<!-- table ")]
    assert sorted(names) == sorted(write_question_pages._NAMES)
    assert text.count("<!-- table ") == text.count("<!-- end of table -->")
