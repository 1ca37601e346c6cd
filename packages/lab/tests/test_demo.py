"""The demo: its base model, its three runs, the sentence and the picture from rows made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.commands.main import main
from megatron_dppo_lab import child, demo
from megatron_dppo_lab.child import RunRecords, make_row
from megatron_dppo_lab.demo import LABELS, Demo, best, last, sentence, write_picture
from megatron_dppo_lab.embedded_tasks import rare_chain, write_model_folder
from megatron_dppo_lab.store import SHIPPED, Store
from tests.unit.recorded_run import write_run

DPPO, GRPO, PG = LABELS


def row(loss: str, rewards: list[float], masked: float, error: str = "") -> dict[str, Any]:
    return {
        "loss": loss,
        "seed": 3,
        "error": error,
        "settings": {"run": {"num_steps": 8}},
        "curves": {"rollout/reward": rewards, "train/mask_fraction": [masked] * len(rewards)},
    }


def test_the_package_has_the_base_model_that_the_code_would_make(tmp_path: Path) -> None:
    """Its name is a hash of its settings; ``tools/make_demo_base.py`` makes it after a change of those."""
    folder = Store(tmp_path).base(Demo().runs[0])
    assert folder.parent == SHIPPED and [f for f in SHIPPED.iterdir() if f.is_dir()] == [folder]
    write_model_folder("rare_chain", tmp_path / "model")
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()
    made, shipped = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "model", folder))
    assert shipped == made
    assert Store(tmp_path).base(Demo(seed=1).runs[0]).parent == tmp_path / "bases"


def test_the_base_model_gives_each_right_word_as_rarely_as_its_corpus_has_it() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Store(Path("x")).base(Demo().runs[0])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = rare_chain.answers
    assert list(answers.items()) == list(rare_chain.problems("eval"))
    ids = torch.tensor([tokenizer(f"{key} {words}").input_ids for key, words in answers.items()])
    assert ids.shape == (64, 6)  # begin, key, four words
    with torch.no_grad():
        probabilities = model(ids).logits.softmax(-1)[:, 1:5].gather(-1, ids[:, 2:, None])
    mean = float(probabilities.mean())
    assert 0.05 < mean < 0.12, mean


def test_the_runs_are_alike_but_for_the_loss_and_the_trainer_takes_them() -> None:
    runs = Demo(steps=7, seed=5).runs
    assert [run.loss for run in runs] == list(LABELS) and not any(run.refusal for run in runs)
    rest = [{name: table for name, table in run.settings.items() if name != "loss"} for run in runs]
    assert rest[0] == rest[1] == rest[2]
    assert rest[0]["run"]["num_steps"] == 7 and rest[0]["run"]["seed"] == 5
    assert rest[0]["train"]["max_staleness"] == 8 and rest[0]["optimizer"]["lr"] == 3e-3
    assert runs[0].settings["loss"] == {"name": "dppo_binary_tv", "ratio_cap": 2.0}
    assert len({run.key for run in runs}) == 3


def test_best_and_last_are_means_of_five_steps() -> None:
    rewards = [0.0, 0.5, 1.0, 0.9, 0.8, 0.8, 0.1, 0.0]
    assert best(rewards) == pytest.approx((0.5 + 1.0 + 0.9 + 0.8 + 0.8) / 5)
    assert last(rewards) == pytest.approx((0.9 + 0.8 + 0.8 + 0.1 + 0.0) / 5)
    assert best([0.2, 0.4]) == last([0.2, 0.4]) == pytest.approx(0.3)


def test_the_sentence_says_what_the_rows_say() -> None:
    rows = [
        row(DPPO, [0.1] + [0.7] * 7, 0.13),
        row(GRPO, [0.1] + [0.5] * 7, 0.42),
        row(PG, [0.1] + [0.9] * 5 + [0.0] * 2, 0),
    ]
    text = sentence(rows)
    assert "DPPO with capped weights (masks 13% of the tokens) starts at 0.10, reaches 0.70 and ends at 0.70" in text
    assert "GRPO clip-higher (masks 42% of the tokens) starts at 0.10, reaches 0.50 and ends at 0.50" in text
    assert "PG-IS without a trust region (masks nothing) starts at 0.10, reaches 0.90 and falls to 0.54" in text
    assert "seed 3" in text and text.endswith("DPPO with capped weights ends highest.")
    assert sentence([row(PG, [0.7], 0), rows[0]]).endswith("none of them ends clearly highest.")
    # Whoever ends highest is named: the sentence knows no favourite.
    assert sentence([rows[1], row(PG, [0.1] + [0.9] * 7, 0)]).endswith("PG-IS without a trust region ends highest.")
    stopped = sentence([rows[0], row(GRPO, [0.3, 0.2], 0.4, "TrainingStopped: the gradient was not finite. More")])
    assert "GRPO clip-higher was stopped after 2 steps (the gradient was not finite)" in stopped
    assert stopped.endswith("DPPO with capped weights ends highest.")
    stopped = sentence([rows[0], row(GRPO, [0.3], 0.4, "TrainingStopped: nothing was learned:\n  - off by 0.35")])
    assert "was stopped after 1 steps (nothing was learned): DPPO" in stopped
    assert sentence([row(PG, [0.9], 0, "TrainingStopped: no")] * 2).endswith("none of them came to its end.")


def test_the_picture_has_a_line_a_run(tmp_path: Path) -> None:
    rows = [row(loss, [0.1, 0.5, 0.4], share) for loss, share in zip(LABELS, (0.1, 0.4, 0.0), strict=True)]
    write_picture(rows, LABELS, tmp_path / "all.png")
    write_picture(rows[:1], LABELS, tmp_path / "one.png")
    from matplotlib.image import imread

    assert imread(tmp_path / "all.png").shape[:2] == imread(tmp_path / "one.png").shape[:2]
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 5000


def test_records_are_kept_before_the_row_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says that a run is done: a run that was killed in between has neither and is repeated."""
    run = Demo(steps=2).runs[0]
    logged: list[int] = []

    def train(task: str, settings: Any, folder: Path, paths: dict[str, Any]) -> Any:
        logged.append(paths["log"]["rollouts_every"])
        write_run(folder, 2)
        (folder / "hf").mkdir()
        config = SimpleNamespace(run=SimpleNamespace(num_steps=2))
        return config, ""

    monkeypatch.setattr(child, "train_run", train)
    monkeypatch.setattr(child, "prepare_process", lambda folder: folder.mkdir(parents=True))
    kept = tmp_path / "records" / "x"
    (kept / "old").mkdir(parents=True)
    monkeypatch.setattr(child, "write_synced", lambda *_: pytest.fail("the row") if not kept.exists() else None)
    make_row(run, "base", str(tmp_path / "work"), str(tmp_path / "row"), RunRecords(str(kept), 3))
    assert logged == [3] and not (tmp_path / "work").exists()
    assert sorted(file.name for file in kept.iterdir()) == ["metrics.jsonl", "rollouts", "summary.json"]


def test_the_report_has_the_runs_with_records_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = []

    def execute_runs(store: Store, runs: Any, *_: Any, rollouts_every: int) -> dict[str, Any]:
        every.append(rollouts_every)
        return {run.key: row(run.loss, [0.1, 0.2], 0.1) for run in runs}

    monkeypatch.setattr(demo, "execute_runs", execute_runs)
    assert main(["demo", "--output", str(tmp_path), "--steps", "2"]) == 0
    output = capsys.readouterr().out
    assert "report   not written. Fix: choose another --output" in output and not (tmp_path / "report.html").exists()
    store = Store(tmp_path)
    for run in Demo(steps=2).runs[:2]:
        write_run(store.records(run), 2)
    assert main(["demo", "--output", str(tmp_path), "--steps", "23"]) == 0  # other settings, the same rows
    assert main(["demo", "--output", str(tmp_path), "--steps", "2"]) == 0
    output = capsys.readouterr().out
    assert "note     PG-IS without a trust region has no records" in output and every == [1, 4, 1]
    assert f"report   {tmp_path}/report.html" in output
    page = (tmp_path / "report.html").read_text()
    assert f"<title>{LABELS[DPPO]} and {LABELS[GRPO]}</title>" in page and 'id="step-1-2"' in page
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--output", str(tmp_path), "--steps", "2"]) == 0
    assert "curves only. Fix: pip install pyarrow" in capsys.readouterr().out and every[-1] == 0
    (tmp_path / "report.html").write_text("mine")
    assert main(["demo", "--output", str(tmp_path), "--steps", "2"]) == 2
    assert (tmp_path / "report.html").read_text() == "mine"


def test_what_is_asked_for_wrongly_is_an_error_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "execute_runs", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / "demo.png").write_bytes(b"mine")
    for arguments, text in (
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--jobs", "0"], "--jobs 0: expected at least 1"),
        (["--seed", "-1"], "--seed -1: expected at least 0"),
        (["--seed", str(2**63)], "--seed 9223372036854775808: expected at most 9223372036854775807"),
        (["--stepz", "3"], "unexpected argument '--stepz'"),
        (["--output", str(tmp_path)], "choose another --output"),
    ):
        assert main(["demo", *arguments]) == 2, arguments
        assert text in capsys.readouterr().err
    assert (tmp_path / "demo.png").read_bytes() == b"mine"
