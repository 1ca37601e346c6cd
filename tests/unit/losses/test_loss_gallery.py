"""The gallery has every loss, its pictures show what the losses do, its verdicts are those of the rows."""

from __future__ import annotations

import json
import lzma
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.experiments.catalogue import SECOND_LOSSES
from megatron_dppo.commands.experiments.named import FIGURE_LOSSES
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names

ROOT = Path(__file__).parents[3]
GALLERY = ROOT / "docs/losses"


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/draw_losses.py"))


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return runpy.run_path(str(ROOT / "tools/write_loss_gallery.py"))


def test_every_loss_has_an_entry_and_a_picture(drawing: dict[str, Any]) -> None:
    result = drawing["entries"]()
    assert {LossConfig(**entry["config"]).name for entry in result} == set(loss_names())
    assert {entry["id"] for entry in result} == {picture.stem for picture in GALLERY.glob("*.png")}
    told = {name for entry in result for name in entry["rows"]}
    assert told == set(SECOND_LOSSES) - set(FIGURE_LOSSES)


@pytest.mark.slow
def test_the_pictures_show_the_current_losses(drawing: dict[str, Any]) -> None:
    written = json.loads((GALLERY / "grids.json").read_text(encoding="utf-8"))
    assert list(written) == [entry["id"] for entry in drawing["entries"]()]
    for entry in drawing["entries"]():
        before, now = written[entry["id"]], drawing["numbers"](LossConfig(**entry["config"]))
        for sign in ("up", "down"):
            assert now[f"masked_{sign}"] == pytest.approx(before[f"masked_{sign}"], abs=2e-3), entry["id"]
            for row, of_row in zip(now[f"factor_{sign}"], before[f"factor_{sign}"], strict=True):
                assert row == pytest.approx(of_row, rel=0.01), entry["id"]


def test_the_pictures_agree_with_the_formulas(drawing: dict[str, Any]) -> None:
    mu, pi = drawing["axis"]()[None, :], drawing["axis"]()[:, None]
    ratio = pi / mu
    clipped = drawing["factors"](LossConfig(name="grpo"), 1.0)
    assert ((clipped == 0) == (ratio > 1.28)).all()
    assert clipped[clipped != 0] == pytest.approx(ratio[clipped != 0])
    moved = drawing["factors"](LossConfig(name="dppo_binary_tv"), -1.0)
    assert ((moved == 0) == (mu - pi > 0.15)).all()
    soft = drawing["factors"](LossConfig(name="drpo/0.15"), 1.0)
    assert soft.numpy() == pytest.approx((ratio * (1 - (pi - mu) / 0.15)).numpy(), rel=1e-6, abs=1e-9)


def row(loss: str, mismatch: str, seed: int, reward: float) -> dict[str, Any]:
    curves = {"rollout/reward": [0.0, 0.0, 0.0, reward]}
    about = {"task": "words", "loss": loss, "mismatch": mismatch, "seed": seed, "phase": "report"}
    return {**about, "curves": curves, "settings": {"run": {"num_steps": 4}}}


def test_the_verdicts_are_those_of_the_rows(writing: dict[str, Any], tmp_path: Path) -> None:
    rows = [row("dppo_binary_tv cap 5", at, seed, 0.5 + seed / 100) for at in ("none", "hot") for seed in range(3)]
    rows += [row("grpo", "none", seed, 0.2 + seed / 100) for seed in range(3)]
    rows += [row("grpo", "hot", seed, 0.51 + seed / 100) for seed in range(3)]
    packed = tmp_path / "rows.jsonl.xz"
    with lzma.open(packed, "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
    page = writing["document"](writing["read_rows"](packed))
    sections = {part.splitlines()[0]: part for part in page.split("\n## ")}
    assert "- `dppo_binary_tv cap 5`, words: 0.51 [0.50, 0.52] without mismatch; 0.51 [0.50, 0.52] hot" in page
    assert (
        "- `grpo`, words: 0.21 [0.20, 0.22] without mismatch; against `dppo_binary_tv cap 5`: above in 0, below in 1 "
        "(none), overlaps in 1" in sections["GRPO clip-higher"]
    )
    assert "Verdict: not measured yet." in sections["IPO"] and "not in the second edition" in sections["GSPO"]


def test_the_page_is_what_the_tool_writes(writing: dict[str, Any]) -> None:
    page = (GALLERY / "README.md").read_text(encoding="utf-8")
    assert page == writing["document"](writing["read_rows"](writing["ROWS"]))
