"""A resume depends on the files that the configuration names: their content, and modules beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_dppo.commands.main import train_main
from tests.e2e.runs import CONFIG, flags, kill_when_exists, train
from tests.e2e.test_resume import assert_same_run
from tests.unit.setup.test_served_models import served

pytestmark = pytest.mark.e2e

REWARD = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import shortness_{tag}

def score(prompt, completion, label, metadata):
    from shortness_{tag} import weight
    return weight * len(completion)
"""
LOSS = """
from megatron_dppo.losses import needs

@needs()
def loss(inputs):
    return -inputs.advantages * inputs.logprobs
"""
FILES = ("rewards.py", "shortness_{tag}.py", "loss.py", "reference/model.safetensors")


def write_files(folder: Path, tag: str, base_model: Path) -> None:
    """Write a reward with a helper beside it, a loss, and a reference model."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD.format(tag=tag))
    (folder / f"shortness_{tag}.py").write_text("weight = -0.125\n")
    (folder / "loss.py").write_text(LOSS)
    (folder / "other.py").write_text("unrelated = 1\n")
    shutil.copytree(base_model, folder / "reference")


def arguments(short_run: list[str], files: Path, run: Path) -> list[str]:
    named = flags(
        reward__function=files / "rewards.py:score",
        reward__kl_coef=0.01,
        loss__name=f"{files}/loss.py:loss",
        model__reference_path=files / "reference",
        run__output_dir=run,
        run__num_steps=3,
        checkpoint__save_every=1,
        checkpoint__keep=5,
        parallel__expert_model_parallel_size=2,
    )
    return [*short_run, *named]


def edit(files: Path, name: str) -> None:
    """Change what a file does: a sign, or weights times 1.3."""
    file = files / name
    if file.suffix == ".py":
        file.write_text(
            file.read_text()
            .replace("-0.125", "0.125")
            .replace("return weight", "return -weight")
            .replace("-inputs", "-2 * inputs")
        )
    else:
        save_file({key: value * 1.3 for key, value in load_file(file).items()}, file)


def test_edited_files_are_refused_and_unchanged_ones_resume_bit_for_bit(
    short_run: list[str], base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag = tmp_path.name.replace("-", "_")
    files, run = tmp_path / "files", tmp_path / "killed"
    write_files(files, tag, base_model)
    undisturbed = train(arguments(short_run, files, tmp_path / "undisturbed"), processes=2)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    kill_when_exists(run / "checkpoints/step_000002", arguments(short_run, files, run))
    shutil.rmtree(run / "checkpoints/step_000003", ignore_errors=True)

    def dry_run(*more: str) -> tuple[int, str]:
        """The checks of a resume, without an update."""
        code = train_main([str(CONFIG), *arguments(short_run, files, run), *more, "--dry-run", "--world-size", "2"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    keys = ("reward.function", "reward.function", "loss.name", "model.reference_path")
    for name, key in zip((each.format(tag=tag) for each in FILES), keys, strict=True):
        shutil.copytree(files, tmp_path / "backup")
        edit(files, name)
        code, said = dry_run()
        assert code == 2 and f"  {key}: the content of " in said and Path(name).name in said, (name, said)
        assert f"--allow-changed {key}" in said and " -> " in said, said
        other = "train.epochs" if key != "loss.name" else "reward.function"
        code, said = dry_run("--allow-changed", other)
        assert code == 2 and f"  {key}: the content of " in said, "another name accepts nothing"
        shutil.rmtree(files)
        (tmp_path / "backup").rename(files)
    edit(files, "loss.py")
    edit(files, "rewards.py")
    refused = train(arguments(short_run, files, run), processes=2)
    assert refused.returncode == 1, "as torchrun ends for ranks that end with 2"
    assert refused.stderr.count("the content of ") == 2, "one message names both"

    # Accepted by name: resumes, says so, and the record of the start has it.
    shutil.copytree(run, tmp_path / "accepted")
    accepted = train(
        [*arguments(short_run, files, tmp_path / "accepted"), "--allow-changed", "loss.name,reward.function"],
        processes=2,
    )
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert "changed, by checkpoint.accept_changes: loss.name: the content of " in accepted.stdout
    record = json.loads((tmp_path / "accepted/starts.jsonl").read_text().splitlines()[-1])
    changed = {change.partition(":")[0] for change in record["changes"]}
    assert changed == {"checkpoint.accept_changes", "loss.name", "reward.function", "run.output_dir"}
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "accepted", tmp_path / "undisturbed")
    (files / "loss.py").write_text(LOSS)
    (files / "rewards.py").write_text(REWARD.format(tag=tag))

    # Unchanged, in another place, beside a file that nothing imports and that is edited.
    (files / "other.py").write_text("unrelated = 2\n")
    moved = files.rename(tmp_path / "moved")
    resumed = train(arguments(short_run, moved, run), processes=2)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "(step 2, " in resumed.stdout and "the content of " not in resumed.stdout
    assert_same_run(run, tmp_path / "undisturbed")


def test_another_model_behind_a_url_is_refused(
    short_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = {"data": [{"index": 0, "embedding": [0.5]}]}
    model = {"model_id": "org/rewards", "model_sha": "first"}
    with served({"/info": model, "/v1/embeddings": score}) as url:
        options = {"url": url, "endpoint": "openai_embeddings", "batch_size": 1}
        named = flags(
            reward__function="reward_model",
            **{f"reward__options__{name}": value for name, value in options.items()},
            run__num_steps=1,
            checkpoint__save_every=1,
        )
        run = train([*short_run, *named])
        assert run.returncode == 0, run.stdout + run.stderr
        assert "reward.options.url: of the model behind it a resume compares only its name, revision" in run.stdout

        def dry_run(*more: str) -> tuple[int, str]:
            code = train_main([str(CONFIG), *short_run, *named, *more, "--dry-run", "--world-size", "1"])
            captured = capsys.readouterr()
            return code, captured.out + captured.err

        assert dry_run()[0] == 0
        model["model_sha"] = "second"
        code, said = dry_run()
        assert code == 2 and "reward.options.url: the served model's revision: first -> second" in said, said
        code, said = dry_run("--allow-changed", "reward.options.url")
        assert code == 0 and "changed: reward.options.url: the served model's revision" in said, said
