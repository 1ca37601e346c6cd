"""Grids, bands, tables and verdicts of experiments, from rows made by hand; the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiment_rows import row_of
from megatron_dppo.commands.main import main
from megatron_dppo.config.io import validate
from megatron_dppo_lab import catalogue as tasks
from megatron_dppo_lab import perturbation as quantized
from megatron_dppo_lab import runner
from megatron_dppo_lab.catalogue import (
    LOSSES,
    MISMATCHES,
    REAL_MIXTURE,
    REAL_MODEL,
    TASKS,
    base_identity,
    base_settings,
)
from megatron_dppo_lab.experiment import SEARCH_SEEDS, Block, Claim, Experiment, choose
from megatron_dppo_lab.figures import format_results, write_page
from megatron_dppo_lab.grid import PLACEHOLDER_PATHS, GridRun, merged
from megatron_dppo_lab.named import EXPERIMENTS
from megatron_dppo_lab.runner import execute_runs
from megatron_dppo_lab.statistics import Band, bands, final, held_out, mean_reward
from megatron_dppo_lab.store import Store
from megatron_dppo_lab.verdicts import format_verdicts

ROOT = Path(__file__).parents[3]
SMALL = Experiment(
    "small",
    "Small",
    blocks=(Block("rare_words", ("dppo_binary_tv", "grpo", "minirl"), ("none", "staleness 4"), {}),),
    quick=(Block("rare_words", ("grpo",), ("none",), {}),),
    search_under="none",
)


def row(loss: str, seed: int, rewards: list[float], **values: Any) -> dict[str, Any]:
    return {
        "key": f"{loss}{seed}{values}",
        "task": "rare_words",
        "mismatch": "none",
        "loss": loss,
        "seed": seed,
        "phase": "report",
        "candidate": 0,
        "settings": {"run": {"num_steps": 4}},
        "error": "",
        "curves": {"rollout/reward": rewards, "train/mask_fraction": [0.25, 0.5]},
        "tokens": {},
        "cpu_seconds": 1800.0,
    } | values


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_of_every_experiment_is_a_configuration_that_the_trainer_takes_or_refuses_for_a_reason(
    name: str,
) -> None:
    experiment = EXPERIMENTS[name]
    for quick in (False, True):
        runs = [*experiment.search(quick), *experiment.report(quick, None, ())]
        refused = {(run.loss, run.mismatch, run.refusal) for run in runs if run.refusal}
        # It is anchored on weights that are gone when older rollouts are trained on.
        assert {loss for loss, _, _ in refused} <= {"minirl"}
        assert all("max_staleness" in reason for _, _, reason in refused)
        accepted = [run for run in runs if not run.refusal]
        reported = [run for run in accepted if run.phase == "report"]
        assert len({run.key for run in reported}) == len(reported), "two cells of the table are one run"
        assert not {run.seed for run in accepted if run.phase == "search"} & {run.seed for run in reported}
    for claim in experiment.claims:
        assert {claim.better, claim.worse} <= set(LOSSES)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {REAL_MODEL, REAL_MIXTURE}))
def test_the_base_model_of_a_task_and_seed_is_a_run_of_its_own_without_the_losses(task: str) -> None:
    config = validate(merged(base_settings(f"task:{task}", 7), PLACEHOLDER_PATHS), "base")
    assert config.run.num_steps >= 1000 and config.run.seed == 7 and config.data.train == f"task:{task}"
    runs = [
        GridRun(task, loss, "none", 7, merged(TASKS[task], {"run": {"seed": 7}, "loss": {"name": loss}}))
        for loss in ("grpo", "pg_is")
    ]
    store = Store(Path("x"))
    assert store.base(runs[0]) == store.base(runs[1]) and runs[0].key != runs[1].key
    for place in (Store.base, Store.row):
        assert place(Store(Path("x"), 5), runs[0]) != place(store, runs[0])


def test_the_real_models_base_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = EXPERIMENTS["real_model"]
    run = experiment.report(False, (7,), ())[0]
    before = Store(tmp_path).base(run).name
    assert run.task == REAL_MODEL and run.settings["data"]["train"] == "train.jsonl"  # the same on every machine
    files = tmp_path / "examples/smollm2"
    shutil.copytree(ROOT / "examples/smollm2", files)
    monkeypatch.setattr(tasks, "shipped_folder", lambda name: tmp_path / name)
    assert Store(tmp_path).base(run).name == before
    (files / "reward.py").write_text("")
    assert Store(tmp_path).base(run).name != before
    # The mixture of experts has the same files, and other weights.
    assert base_identity(REAL_MIXTURE, 0) != base_identity(REAL_MODEL, 0)


def test_settings_are_laid_over_one_another_and_the_key_is_of_what_the_result_depends_on() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}
    first, second = (SMALL.report(False, (0,), ())[0] for _ in range(2))
    other = SMALL.report(False, (1,), ())[0]
    assert first.key == second.key != other.key
    assert merged(MISMATCHES["hot"].settings)["optimizer"] == {"lr": 3e-3}


def test_the_search_tries_every_candidate_on_seeds_of_its_own_and_the_best_is_reported() -> None:
    runs = SMALL.search(quick=False)
    assert {(r.loss, r.candidate, r.seed) for r in runs} == {
        (loss, number, seed)
        for loss in ("dppo_binary_tv", "grpo", "minirl")
        for number in range(3)
        for seed in SEARCH_SEEDS
    }
    assert not SMALL.search(quick=True)
    scores = {0: (0.9, 0.1), 1: (0.6, 0.6), 2: (0.2, 0.3)}
    rows = [
        row("grpo", seed, [value] * 4, phase="search", candidate=number)
        for number, values in scores.items()
        for seed, value in zip(SEARCH_SEEDS, values, strict=True)
    ]
    assert choose(rows)["rare_words", "grpo"][0] == 1
    reported = SMALL.report(False, (0,), rows)
    chosen = {run.loss: (run.candidate, run.settings["loss"]) for run in reported}
    assert chosen["grpo"] == (1, {"name": "grpo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28})
    assert chosen["dppo_binary_tv"] == (0, {"name": "dppo_binary_tv", "ratio_cap": "off"})


def test_scores_are_means_over_all_steps_and_over_the_last_quarter_and_missing_steps_count_as_nothing() -> None:
    assert mean_reward(row("grpo", 0, [0.0, 0.2, 0.4, 1.0])) == pytest.approx(0.4)
    assert final(row("grpo", 0, [0.0, 0.2, 0.4, 1.0])) == 1.0
    stopped = row("grpo", 0, [0.8, 0.8], error="TrainingStopped: no")
    assert (mean_reward(stopped), final(stopped)) == (0.4, 0.0)


def test_the_held_out_score_has_the_evaluations_after_the_first_and_missing_ones_count_as_nothing() -> None:
    settings = {"run": {"num_steps": 20}, "eval": {"every": 5}}
    complete, stopped = (
        row("grpo", 0, [], settings=settings, curves={"eval/accuracy": accuracies})
        for accuracies in ([0.9, 0.2, 0.4, 0.6, 0.8], [0.9, 0.2, 0.4])
    )
    assert held_out(complete) == pytest.approx(0.5)
    assert held_out(stopped) == pytest.approx(0.15)
    claims = [Claim("A", "ipo", "grpo", "held_out")]
    runs = SMALL.report(False, (0,), ())
    assert "held-out" not in format_results([complete], runs, [Claim("B", "ipo", "grpo")])
    table = format_results([complete], runs, claims).split("mean held-out accuracy")[1]
    assert "| grpo | 0.50 [0.50, 0.50] (1) | - |" in table
    rows = [complete | {"key": f"{loss}{s}", "loss": loss, "seed": s} for loss in ("grpo", "ipo") for s in range(3)]
    verdicts = format_verdicts(rows, claims)
    assert "open in 1: rare_words/none 0.50 [0.50, 0.50] against 0.50 [0.50, 0.50]" in verdicts


ROWS = [
    *(row("dppo_binary_tv", s, [v] * 4) for s, v in enumerate((0.7, 0.75, 0.8))),
    *(row("grpo", s, [v] * 4) for s, v in enumerate((0.5, 0.6, 0.69))),
    *(row("pg_is", s, [v] * 4) for s, v in enumerate((0.6, 0.72, 0.9))),
    *(row("cispo", s, [0.9] * 4) for s in range(2)),
    row("ipo", 0, [1.0] * 4, phase="search"),
]


def test_a_band_is_the_mean_and_the_extremes_over_seeds() -> None:
    result = bands(ROWS, mean_reward)
    assert result["rare_words", "none", "grpo"] == Band(pytest.approx(0.59667, abs=1e-4), 0.5, 0.69, 3)
    assert ("rare_words", "none", "ipo") not in result


def test_the_table_shows_bands_what_is_missing_what_is_refused_and_what_stopped() -> None:
    stopped = row("grpo", 3, [0.1], error="TrainingStopped: the gradient")
    text = format_results([*ROWS, stopped], SMALL.report(False, (0, 1, 2), ()))
    lines = text.splitlines()
    assert lines[2] == "| loss | none | staleness 4 |"
    assert lines[4] == "| dppo_binary_tv | 0.75 [0.70, 0.80] (3) | - |"
    assert "| minirl | - | refused |" in lines
    assert "| dppo_binary_tv | 37.5% | - |" in lines
    assert "- rare_words, none, grpo, seed 3: TrainingStopped: the gradient" in lines
    assert any("refused, " in line and "max_staleness" in line for line in lines)


def test_a_claim_holds_only_where_the_bands_do_not_overlap_and_three_seeds_are_there() -> None:
    claims = [
        Claim("A", "dppo_binary_tv", "grpo"),
        Claim("B", "grpo", "dppo_binary_tv"),
        Claim("C", "dppo_binary_tv", "pg_is"),
        Claim("D", "cispo", "grpo"),
        Claim("E", "drpo", "grpo"),
    ]
    text = format_verdicts(ROWS, claims).split("\n\n")[0].splitlines()
    verdicts = {text[i][2]: text[i + 1].split(":")[0].strip(" -") for i in (0, 2, 4, 6)}
    assert verdicts == {"A": "holds in 1", "B": "reversed in 1", "C": "open in 1", "D": "too few seeds in 1"}
    assert text[-1] == "- E: not measured."
    assert "- dppo_binary_tv / grpo: 1 : 0 : 0; 0 : 0" in format_verdicts(ROWS, claims)


def test_where_bands_overlap_a_difference_on_every_seed_is_told_apart() -> None:
    easy = (0.1, 0.3, 0.5, 0.7, 0.9)  # what a seed's base model makes of any loss
    rows = [
        *(row("grpo", s, [v] * 4) for s, v in enumerate(easy)),
        *(row("ipo", s, [v + 0.01 * (s + 1)] * 4) for s, v in enumerate(easy)),
        *(row("drpo", s, [v + 0.01 * (s - 1)] * 4) for s, v in enumerate(easy)),
        *(row("pg_is", s, [v + 0.01] * 4) for s, v in enumerate(easy[:4])),
    ]
    claims = [Claim(name, *pair) for name, pair in (("A", ("ipo", "grpo")), ("B", ("grpo", "ipo")))]
    claims += [Claim("C", "drpo", "grpo"), Claim("D", "pg_is", "grpo")]
    text = format_verdicts(rows, claims)
    result = [line.strip(" -") for line in text.split("\n\n")[0].splitlines()[1::2]]
    assert [line.split(" in 1")[0] for line in result] == [
        "higher on every seed",
        "lower on every seed",
        "open",
        "open",
    ]
    assert "0.53 [0.11, 0.95] against 0.50 [0.10, 0.90] (+0.030 [+0.010, +0.050])" in result[0]
    assert "- grpo / ipo: 0 : 0 : 1; 0 : 1" in text


def test_the_figure_has_a_band_for_each_loss(tmp_path: Path) -> None:
    write_page(ROWS, tmp_path / "page.png", "Small")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_that_have_a_row_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs, done = Store(tmp_path), SMALL.report(False, (0, 1), ()), []

    def pretend(jobs: list[Any], *_: object, quantized: bool) -> None:
        assert not quantized, "no run of this grid rounds weights, so none needs nvidia-modelopt"
        for job in jobs:
            done.append(job.name)
            if job.result.suffix == ".json":
                job.result.write_text(json.dumps(row_of(job.arguments[0], store)))
            else:
                job.result.mkdir()

    monkeypatch.setattr(runner, "execute_jobs", pretend)
    accepted = [run for run in runs if not run.refusal]
    assert len(execute_runs(store, runs, 1, print, limit=3)) == 3
    assert [name.startswith("base") for name in done] == [True, False, False, True, False]  # by base model
    done.clear()
    assert len(execute_runs(store, [*runs, *runs], 1, print)) == len(accepted)
    assert len(done) == len(accepted) - 3
    done.clear()
    assert execute_runs(store, runs, 1, print) == store.read(accepted) and not done


def test_the_command_lists_what_is_missing_and_refuses_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["experiment", "long_tail", "--quick", "--list", "--output", str(tmp_path), "--seeds", "0"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].endswith("rare_words, staleness 4, dppo_binary_tv, seed 0")
    for wrong, message in (
        (["experiment", "windtunel"], "expected one of windtunnel, windtunnel3, stability"),
        ([*command, "--jobs", "0"], "--jobs 0: expected at least 1"),
        ([*command, "--loss.name", "grpo"], "unexpected argument '--loss.name'"),
        ([*command, "--seeds", "0", "-1"], "--seeds -1: expected 0 to 9223372036854775807"),
        ([*command, "--seeds", str(2**63)], f"--seeds {2**63}: expected 0 to {2**63 - 1}"),
        ([*command, "--seeds", "3", "0", "3"], "--seeds 3 is given twice"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_modelopt_is_imported_before_the_fork_only_if_a_run_quantizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preloaded: list[list[str]] = []

    class Context:
        def set_forkserver_preload(self, modules: list[str]) -> None:
            preloaded.append(modules)

    monkeypatch.setattr(runner, "require_modelopt", lambda form: None)
    monkeypatch.setattr(runner, "list_jobs", lambda *_: [])
    monkeypatch.setattr(runner.multiprocessing, "get_context", lambda method: Context())
    for name, weights in (("long_tail", "none"), ("stability", "fp8")):
        run = next(run for run in EXPERIMENTS[name].report(True, (0,), ()) if run.weights == weights)
        with contextlib.suppress(FileNotFoundError):  # no run writes its row
            execute_runs(Store(tmp_path), [run], 1, print)
    assert [modules[1:] for modules in preloaded] == [[], ["modelopt.torch.quantization"]]


def test_coarse_weights_without_modelopt_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    monkeypatch.setattr(runner, "execute_jobs", lambda *_, **__: pytest.fail("a run was started"))
    assert main(["experiment", "stability", "--quick", "--output", str(tmp_path)]) == 2
    assert "weights = 'fp8'" in (text := capsys.readouterr().err) and "pip install 'megatron-dppo[modelopt]'" in text
