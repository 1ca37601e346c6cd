"""A step's file: every column comes back as it was, and what is counted in it is counted right."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest
import torch

from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import DataError
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.steps.files import (
    delete_steps_after,
    estimate_step_bytes,
    read_meta,
    read_rows,
    recorded_steps,
)
from megatron_dppo.report.steps.rows import RankSamples, groups_from_rows
from megatron_dppo.report.steps.tokens import TABLE_COLUMNS, masked_table, masked_tokens, read_tokens
from tests.unit.recorded_run import decode, sample, write_run


def test_groups_survive_a_round_trip(tmp_path: Path) -> None:
    from megatron_dppo.report.steps.files import StepMeta, write_step
    from megatron_dppo.types import RolloutGroup

    torch.manual_seed(0)
    made = [sample(random.Random(1), 0, 5) for _ in range(3)]
    group = RolloutGroup(prompt=made[0][0].prompt, rollouts=tuple(rollout for rollout, _ in made))
    part = RankSamples(dp_rank=0, groups=[group], ages=[2], trained=[trained for _, trained in made])
    meta = StepMeta(7, 3, 1, 1, "one", "grpo", "abc")
    file = write_step(tmp_path, meta, [part])
    assert read_meta(file) == meta and list(recorded_steps(tmp_path)) == [7]
    (back,), ages = groups_from_rows(read_rows(file))
    assert ages == [2] and back.prompt == group.prompt and not list(file.parent.glob("*.partial"))
    for was, now in zip(group.rollouts, back.rollouts, strict=True):
        assert (was.reward, was.reward_parts, was.eval_score) == (now.reward, now.reward_parts, now.eval_score)
        for name, value in vars(was.completion).items():
            other = getattr(now.completion, name)
            same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert same and getattr(value, "dtype", None) == getattr(other, "dtype", None), name


def test_masked_tokens_equal_a_count_over_pandas_rows(tmp_path: Path) -> None:
    write_run(tmp_path, 1, tokens=40)
    rows = pd.read_parquet(tmp_path / "rollouts/step_000001.parquet")
    counts: dict[tuple[int, int], int] = {}
    for row in rows.itertuples():
        for token, mask, keep, advantage in zip(row.response_ids, row.loss_mask, row.keep, row.advantages, strict=True):
            if mask and not keep and advantage:
                place = (int(token), 1 if advantage > 0 else -1)
                counts[place] = counts.get(place, 0) + 1
    step = read_tokens(tmp_path / "rollouts/step_000001.parquet")
    masked = masked_tokens(step, most=1000)
    assert {(each.token_id, each.sign): each.count for each in masked} == counts
    assert [each.count for each in masked] == sorted(counts.values(), reverse=True)
    assert sum(each.share for each in masked if each.sign > 0) == pytest.approx(1)
    for each in masked[:6]:
        has = rows.response_ids.map(lambda ids, token=each.token_id: token in ids)
        few = min(has.sum(), (~has).sum()) < 3
        gap = None if few else rows.reward[has].mean() - rows.reward[~has].mean()
        assert each.reward_gap == (None if gap is None else pytest.approx(gap))
    assert len(masked_table(masked, decode)) == len(masked)


def test_the_masked_token_table_in_tensorboard_escapes_markup(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, 1, tokens=40)
    masked = masked_tokens(read_tokens(tmp_path / "rollouts/step_000001.parquet"))
    writer = MetricsWriter(tmp_path, {}, LogConfig(), resumed_step=None)
    assert writer.has_tables
    writer.write_table(1, "rollouts/masked_tokens", TABLE_COLUMNS, masked_table(masked, decode))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("rollouts/masked_tokens/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.count("\n") == len(masked) + 1 and "<" not in text and f"| {masked[0].count} |" in text


def test_a_file_is_at_most_as_large_as_estimated(tmp_path: Path) -> None:
    write_run(tmp_path, 1, tokens=200)
    more = 2 * 2 + 3 * 8  # routes of two layers and experts, and three slots of a Top-K
    assert (tmp_path / "rollouts/step_000001.parquet").stat().st_size <= estimate_step_bytes(16, 200, more=more)


def test_steps_after_the_checkpoint_are_deleted_and_foreign_files_rejected(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    (tmp_path / "rollouts/notes.txt").write_text("the user's")
    delete_steps_after(tmp_path, 1)
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == ["notes.txt", "step_000001.parquet"]
    other = tmp_path / "other.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(other)
    for read in (read_meta, read_tokens):
        with pytest.raises(DataError, match=r"other\.parquet"):
            read(other)
    with pytest.raises(DataError, match=r"notes\.txt"):
        read_rows(tmp_path / "rollouts/notes.txt")
