"""``megatron-dppo base``: its settings, and what it refuses before it trains."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo_lab import base_model
from megatron_dppo_lab.catalogue import base_identity, base_settings

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations with which the command would have trained."""
    configs: list[Config] = []
    monkeypatch.setattr(base_model, "train_base", lambda config, inputs, target, report: configs.append(config))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return configs


def test_options_and_overrides_change_the_settings_of_the_task(trained: list[Config], tmp_path: Path) -> None:
    folder = str(tmp_path / "base")
    assert main(["base", "task:rare_chain", folder]) == 0
    options = ["--steps", "3", "--batch-size", "4", "--seed", "5", "--optimizer.lr", "0.1"]
    assert main(["base", "task:chain_sum", folder, *options]) == 0
    task, chosen = trained
    assert (task.run.num_steps, task.rollout.prompts_per_step, task.optimizer.lr, task.run.seed) == (2000, 192, 3e-3, 0)
    assert (chosen.run.num_steps, chosen.rollout.prompts_per_step, chosen.run.seed) == (3, 4, 5)
    assert (chosen.optimizer.lr, chosen.optimizer.adam_beta2, chosen.data.train) == (0.1, 0.98, "task:chain_sum")


def test_pairs_of_a_file_train_any_model(trained: list[Config], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "response": "2"}\n')
    assert main(["base", str(pairs), str(tmp_path / "base"), "--model.path", str(MODEL)]) == 0
    (config,) = trained
    assert (config.data.train, config.model.path, config.run.num_steps) == (str(pairs), str(MODEL), 1600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task:chain_sum", "."], "already exists. Fix: name another folder"),
        (["task:chain_sum", "new", "--processes", "0"], "--processes 0: expected at least 1"),
        (["task:sums", "new"], "model.path is missing"),
        (["task:sums", "new", "--model.path", str(MODEL)], "unknown task 'task:sums'"),
        (["task:chain_sum", "new", "--batch-size", "3", "--processes", "2"], "rollout.prompts_per_step = 3 is not"),
        (["task:chain_sum", "new", "--warmup.num_steps", "3"], "megatron-dppo base"),
    ],
)
def test_problems_are_reported_before_anything_is_trained(
    trained: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    started = subprocess.run

    def run(command: list[str], **more: Any) -> Any:
        assert "torch.distributed.run" not in command, "training processes were started"
        return started(command, **more)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["base", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not trained and not (tmp_path / "new").exists()


def test_an_example_makes_its_base_model_once_for_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    commands: list[list[str]] = []

    def create_base(source: str, folder: Path, overrides: list[str]) -> None:
        made.append((source, *overrides))
        folder.mkdir(parents=True)

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_model, "create_base", create_base)
    monkeypatch.setattr(subprocess, "run", run)
    for seed in ("0", "3", "3"):
        assert main(["examples", "rare_chain", "--seed", seed]) == 0
        training = commands[-2]
        index = training.index("megatron_dppo.train")
        config = load_config(training[index + 1], training[index + 2 :])
        assert Path(config.model.path).resolve() == tmp_path / f"runs/models/rare_chain-{seed}"
        assert training[training.index("--nproc-per-node") + 1] == "1" and config.rollout.dtype == "fp32"
    assert made == [("task:rare_chain", "--run.seed=0"), ("task:rare_chain", "--run.seed=3")]


@pytest.mark.parametrize("task", ["chain_sum", "rare_words", "rare_chain", "rare_words_32k"])
def test_the_settings_of_a_base_are_those_of_its_identity(task: str) -> None:
    """The names of bases and rows come from the identity, so it must describe what is trained."""
    settings: Any = base_settings(f"task:{task}", 7)
    identity: Any = base_identity(task, 7)
    warmup = identity["warmup"]
    defaults: Any = base_settings("a file")
    assert settings["run"]["num_steps"] == warmup["num_steps"]
    assert settings["rollout"]["prompts_per_step"] == warmup.get("batch_size", 96)
    assert settings["optimizer"] == defaults["optimizer"] | warmup.get("optimizer", {})
    assert settings["run"]["seed"] == identity["run"]["seed"] == 7 and settings["data"]["train"] == warmup["data"]
    assert settings["model"]["dtype"] == identity["model"]["dtype"]
