"""A run is the same from every folder and by every spelling of its paths, also in a copy of all its files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.runs import ROOT, environment
from tests.unit.data_files import write_jsonl

pytestmark = pytest.mark.e2e

TOML = """
[run]
output_dir = "../runs/one"
num_steps = 1
[model]
path = "model"
dtype = "fp32"
[data]
train = ["data/train.jsonl"]
eval = {small = "./data/eval.jsonl"}
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 12
[reward]
function = "score.py:score"
[train]
max_staleness = 1
[optimizer]
lr = 3e-4
lr_decay_style = "constant"
[checkpoint]
save_every = 1
keep = 9
[log]
rollouts_every = 1
tensorboard = false
curves = false
"""
SCORE = "def score(prompt, completion, label):\n    return float(len(completion) % 3)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with configuration, model, data and reward; the run goes beside it."""
    folder = tmp_path / "here" / "project"
    (folder / "data").mkdir(parents=True)
    shutil.copytree(ROOT / "examples/chain_sum/model", folder / "model")
    (folder / "my.toml").write_text(TOML)
    (folder / "score.py").write_text(SCORE)
    rows = [{"prompt": f"{i}+{j}-1=", "label": str(i + j - 1)} for i in range(1, 9) for j in range(1, 9)]
    write_jsonl(folder / "data/train.jsonl", rows[8:])
    write_jsonl(folder / "data/eval.jsonl", rows[:8])
    return folder


def run(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """``megatron-dppo ARGUMENTS`` in a folder."""
    done = train_forked([str(each) for each in arguments], environment(), 1, 300, entry="main", cwd=cwd)
    assert done.returncode == 0, f"{arguments} in {cwd}: {done.stdout}{done.stderr}"
    return done


def resumed_at(output: str, step: int, *changed: str) -> None:
    """A start resumed, kept the rollouts of stale steps, and saw these changes alone."""
    assert f"step_{step:06d} (step {step}, policy version {step})" in output, output
    assert "sampled again" not in output
    changes = [line.split("changed: ")[1].split(":")[0] for line in output.splitlines() if "changed" in line]
    assert changes == list(changed), output


def test_a_run_is_started_resumed_and_read_from_three_folders(project: Path, tmp_path: Path) -> None:
    top, far = tmp_path / "here", tmp_path / "far/away"
    far.mkdir(parents=True)
    run(project, "train", "my.toml")
    folder = top / "runs/one"
    # Relative from above, absolute from elsewhere, through a link, and from the run's own config.toml.
    steps = ("run.num_steps",)
    done = run(top, "train", "project/my.toml", "--run.output_dir", "runs/one", "--run.num_steps", "2")
    resumed_at(done.stdout, 1, *steps)
    moved = ["--run.output_dir", str(folder), "--model.path", "../../here/project/model", "--run.num_steps", "3"]
    resumed_at(run(far, "train", project / "my.toml", *moved).stdout, 2, *steps)
    (far / "link").symlink_to(project)
    linked = run(far, "train", "link/my.toml", "--run.output_dir", "../../here/runs/one", "--run.num_steps", "4")
    resumed_at(linked.stdout, 3, *steps)
    resumed_at(run(far, "train", folder / "config.toml", "--run.num_steps", "5").stdout, 4, *steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "rollout/reward" in line] == [1, 2, 3, 4, 5]

    for cwd, name in ((top, "runs/one"), (far, folder)):
        scores = tmp_path / f"{cwd.name}.json"
        run(cwd, "eval", name, "--run-functions", "--json", scores)
        assert json.loads(scores.read_text())["small/accuracy"] == lines[-1]["eval/small/accuracy"]
        assert "report.html" in run(cwd, "report", name).stdout
    for cwd, name in ((project, "../runs/one"), (far, folder)):
        assert "mismatch of" in run(cwd, "diagnose", name, "--run-functions").stdout
        assert "identical to the run, bit for bit" in run(cwd, "replay", name, "--step", "3").stdout


def test_a_copy_of_the_files_is_the_same_run_and_other_content_is_not(project: Path, tmp_path: Path) -> None:
    run(project, "train", "my.toml")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "here", copy)
    shutil.rmtree(tmp_path / "here")
    (copy / "project/data/train.jsonl").rename(copy / "project/data/renamed.jsonl")
    (copy / "project/my.toml").write_text(TOML.replace("train.jsonl", "renamed.jsonl"))
    done = run(copy / "project", "train", "my.toml", "--run.num_steps", "2")
    resumed_at(done.stdout, 1, "run.num_steps")

    prompts = (copy / "project/data/renamed.jsonl").read_text().replace("8+8-1", "8+9-1")
    (copy / "project/data/other.jsonl").write_text(prompts)
    shutil.copytree(copy / "project/data", copy / "others")
    (copy / "others/eval.jsonl").write_text(prompts)
    for key, value, text in (
        ("data.train", "data/other.jsonl", "was written with prompts = 56 prompts, "),
        ("data.eval.small", "../others/eval.jsonl", "data.eval.small: "),
    ):
        arguments = ["train", "my.toml", "--run.num_steps", "3", f"--{key}", value]
        refused = train_forked(arguments, environment(), 1, 300, entry="main", cwd=copy / "project")
        assert refused.returncode != 0 and text in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
