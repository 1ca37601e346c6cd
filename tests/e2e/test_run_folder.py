"""A run's folder over several starts, as a user sees it: refused, locked, damaged, overwritten."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from megatron_dppo.setup.run_folder import MARKER, OLD, RUN_FILES
from tests.e2e.forked import train_forked
from tests.e2e.runs import CONFIG, command, environment, flags, records, train, without_timings

pytestmark = pytest.mark.e2e


def contents(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def starts(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_several_starts_in_one_folder(short_run: list[str], tmp_path: Path) -> None:
    """One story, because each start costs ten seconds."""
    folder = tmp_path / "run"
    arguments = [*short_run, *flags(checkpoint__save_every=1, checkpoint__keep=3)]

    # Two at once: the one that comes second ends without a trace. Both load for as long, and a run takes longer.
    both = [
        subprocess.Popen(
            command(arguments, 1), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = {run: run.communicate(timeout=400)[0] for run in both}
    first, second = sorted(both, key=lambda run: run.returncode)
    assert (first.returncode, second.returncode) == (0, 2), outputs
    assert f"in use by another run: process {first.pid} on " in outputs[second]
    assert [r["step"] for r in records(folder)] == [0, 1, 2]
    ours = {path.name for path in folder.iterdir()}
    assert ours - {MARKER} <= set(RUN_FILES), "what a run writes has to be in the table of what is moved aside"
    assert [(s["number"], s["resumed_step"], s["pid"]) for s in starts(folder)] == [(1, None, first.pid)]

    # A refused start changes nothing.
    before = contents(folder)
    refused = train([*arguments, *flags(loss__name="grpo", rollout__temperature=0.9, log__progress="false")])
    assert refused.returncode == 2
    assert "loss.name: 'dppo_binary_tv' -> 'grpo'\n  rollout.temperature: 1.0 -> 0.9\n" in refused.stderr
    assert contents(folder) == before

    # The newest checkpoint is damaged: the run goes on from the one before, to the same numbers, and says so.
    reference = without_timings(folder)
    shard = next((folder / "checkpoints/step_000002").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (folder / "config.toml").write_text("# edited by the user\n")
    again = train([*arguments, *flags(eval__max_prompts=8, run__timeout_minutes=20)])
    assert again.returncode == 0, again.stderr
    assert f"step_000002 is skipped: {shard.name} has other content than was written" in again.stdout
    assert "(step 1, policy version 2)" in again.stdout and "changed: run.timeout_minutes: 10.0 -> 20" in again.stdout
    assert without_timings(folder) == reference
    names = {p.name for p in (folder / "checkpoints").iterdir()}
    assert names == {"step_000001", "step_000002", "step_000002.damaged"}
    (edited,) = folder.glob("config.toml.*")
    assert edited.read_text() == "# edited by the user\n" and "timeout_minutes" in (folder / "config.toml").read_text()
    last = starts(folder)[-1]
    assert last["resumed_step"] == 1 and last["changes"] == ["run.timeout_minutes: 10.0 -> 20.0"]

    # Overwriting moves all of it aside.
    before = contents(folder)
    over = train([*arguments, *flags(run__overwrite="true", run__num_steps=1, checkpoint__export_hf="false")])
    assert over.returncode == 0, over.stderr
    (old,) = (folder / OLD).iterdir()
    assert f"to {old}; this run begins at step 0" in over.stdout
    moved = {name: digest for name, digest in before.items() if name.split("/")[0] in RUN_FILES}
    assert contents(old).items() >= moved.items() and edited.exists()
    assert [r["step"] for r in records(folder)] == [0, 1]


SCORE = """
import os
from pathlib import Path

FOLDER, DAMAGE = Path(os.environ["FOLDER"]), os.environ["DAMAGE"]

def score(prompt, completion, label):
    file = FOLDER / "metrics.jsonl"
    if file.exists() and file.read_text().count("\\n") == 1 and not (FOLDER.parent / "done").exists():
        (FOLDER.parent / "done").touch()
        file.unlink() if DAMAGE == "metrics" else FOLDER.rename(FOLDER.parent / "elsewhere")
    return float(len(completion) % 3)
"""


@pytest.mark.parametrize("damage", ["metrics", "folder"])
def test_a_run_notices_that_its_files_are_gone(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "score.py").write_text(SCORE)
    arguments = flags(
        run__output_dir=folder,
        run__num_steps=3,
        reward__function=f"{tmp_path}/score.py:score",
        rollout__prompts_per_step=2,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=4,
        eval__max_prompts=2,
        eval__every=100,
        parallel__expert_model_parallel_size=1,
        checkpoint__save_every=1,
        checkpoint__export_hf="false",
        log__curves="false",
    )
    variables = {"FOLDER": str(folder), "DAMAGE": damage}
    result = train_forked([str(CONFIG), *arguments], environment() | variables, 1, timeout=300)
    assert (tmp_path / "done").exists(), result.stderr
    if damage == "metrics":
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("metrics.jsonl was deleted or renamed during the run; it is written again") == 1
        assert [record["step"] for record in records(folder)] == [0, 1, 2, 3]
        # Deleted between two starts, the records are lost, and the resume says so.
        (folder / "metrics.jsonl").unlink()
        more = [*arguments, *flags(run__num_steps=4, checkpoint__accept_changes="true")]
        result = train_forked([str(CONFIG), *more], environment() | variables, 1, timeout=300)
        assert result.returncode == 0, result.stderr
        assert f"{folder}/metrics.jsonl has no record of 3 steps up to step 3, from step 1 on" in result.stdout
        assert [record["step"] for record in records(folder)] == [4]
    else:
        assert result.returncode == 2 and "no longer that of this run: it was deleted or renamed" in result.stderr
        assert not folder.exists() and (tmp_path / "elsewhere" / MARKER).exists()
