"""``megatron-dppo replay`` computes what the run computed: bit for bit on the run's layout, up to rounding on one
process, and not at all where something that it needs is missing or was changed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from megatron_dppo.errors import CheckpointError, ConfigError
from tests.e2e.forked import train_forked
from tests.e2e.runs import environment, flags, step_records, train

pytestmark = pytest.mark.e2e
RECORDED = flags(
    run__num_steps=3,
    log__rollouts_every=1,
    log__curves="false",
    checkpoint__save_every=1,
    checkpoint__keep=9,
    train__mini_batches=2,
    rollout__prompts_per_step=8,
    optimizer__lr=1e-3,
    train__layer_noise__std=1e-3,
)


def replayed(
    folder: Path, step: int, processes: int = 1, more: Sequence[str] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Return the command's output and its JSON; nothing of the run may have changed."""
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    target = folder.with_name("replay.json")
    target.unlink(missing_ok=True)
    arguments = ["replay", str(folder), "--step", str(step), "--json", str(target), *more]
    done = train_forked(arguments, environment(), processes, timeout=420, entry="main")
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before
    return done, json.loads(target.read_text()) if target.is_file() else {}


def exact(folder: Path, step: int, processes: int = 1) -> None:
    done, actual = replayed(folder, step, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert actual["exact"] and actual["same_layout"] and actual["tokens"] > 50, actual
    assert actual["metrics"]["grad_norm"]["run"] > 0, "a step that learned something"


def test_one_process_is_exact_and_says_what_is_missing_or_changed(short_run: list[str], tmp_path: Path) -> None:
    result = train([*short_run, *RECORDED])
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "run"
    for step in (1, 3):
        exact(folder, step)
    done, actual = replayed(folder, 3, more=flags(loss__divergence_threshold_high=1e-4))
    assert done.returncode == 0 and actual["other_decisions"] > 0
    assert "with --loss.divergence_threshold_high" in done.stdout, "another loss on the same step"
    file = folder / "rollouts/step_000003.parquet"
    untouched = file.read_bytes()
    import pyarrow.parquet as parquet

    table = parquet.read_table(file)
    rows = table.to_pylist()
    rows[0]["rollout_logprobs"][0] -= 0.01
    changed = type(table).from_pylist(rows, table.schema)
    parquet.write_table(changed, file)
    assert len(pd.read_parquet(file)) == 32
    done, actual = replayed(folder, 3)
    assert done.returncode == 0 and not actual["exact"], "one log mu is another one"
    file.write_bytes(untouched)
    (folder / "checkpoints/step_000002").rename(tmp_path / "away")
    from megatron_dppo_doctor.replay.replay import replay_step

    with pytest.raises(CheckpointError, match=r"--step 3 needs .*step 2"):
        replay_step(folder, 3)
    with pytest.raises(ConfigError, match="those of 1, 2, 3"):
        replay_step(folder, 9)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"parallel__tensor_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"parallel__pipeline_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"parallel__context_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["data", "tensor", "pipeline", "context"],
)
def test_two_processes_are_exact_and_one_replays_them_up_to_rounding(
    short_run: list[str], tmp_path: Path, layout: dict[str, int]
) -> None:
    result = train([*short_run, *RECORDED, *flags(**layout)], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "run"
    exact(folder, 2, processes=2)
    done, actual = replayed(folder, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not actual["same_layout"] and actual["largest_logprob_difference"] < 1e-4
    for name in ("loss", "grad_norm", "abs_prob_diff"):
        both = actual["metrics"][name]
        assert both["replay"] == pytest.approx(both["run"], rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_experts_on_two_ranks_are_replayed_there_alone(short_run: list[str], tmp_path: Path) -> None:
    more = flags(parallel__expert_model_parallel_size=2, train__router_replay="rollout", train__max_staleness=1)
    result = train([*short_run, *RECORDED, *more], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    exact(tmp_path / "run", 3, processes=2)
    done, _ = replayed(tmp_path / "run", 3)
    assert done.returncode != 0 and "Replay with 2 processes" in done.stderr, done.stderr


@pytest.mark.long
def test_remax_subtracts_the_reward_of_the_response_that_transformers_decodes_greedily(
    short_run: list[str], base_model: Path, tmp_path: Path
) -> None:
    """Two ranks with all groups on each; the first step against ``generate`` of transformers, then an exact replay."""
    settings = flags(
        train__advantage="remax",
        train__mini_batches=1,
        train__max_staleness=1,
        rollout__dynamic_sampling="true",
        parallel__tensor_model_parallel_size=2,
    )
    result = train([*short_run, *RECORDED, *settings], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "run"
    records = step_records(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base_model)
    for number, record in enumerate(records, start=1):
        rows = pd.read_parquet(folder / f"rollouts/step_{number:06}.parquet")
        greedy = rows.greedy.map(lambda each: each["reward"])
        assert record["rollout/greedy_reward"] == pytest.approx(greedy.mean())
        assert f"greedy {greedy.mean():.3f}" in result.stdout
        for row, baseline in zip(rows.itertuples(), greedy, strict=True):
            assert set(row.advantages[row.loss_mask.astype(bool)]) == {np.float32(row.reward - baseline)}
    first = pd.read_parquet(folder / "rollouts/step_000001.parquet").drop_duplicates("group")
    assert len(first) == 8
    for row in first.itertuples():
        prompt = torch.tensor([row.prompt_ids.tolist()])
        ids = model.generate(prompt, do_sample=False, max_new_tokens=64)[0, prompt.shape[1] :]
        assert row.greedy["num_tokens"] == len(ids)
        numbers = re.findall(r"-?\d+", tokenizer.decode(ids, skip_special_tokens=True))
        assert row.greedy["reward"] == float(numbers[-1:] == [row.label])
    exact(folder, 2, processes=2)
