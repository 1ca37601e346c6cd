"""Shares of sources in the stream of prompts, against counts by hand and by brute force."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from columns import ids
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.mix import SourceMix
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.errors import DataError
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.run.run_records import source_metrics
from megatron_dppo.types import Completion, Prompt, PromptLimits, Rollout, RolloutGroup
from tests.unit.configs import config
from tests.unit.streams import FakeEngine, FakeScorer, Run, stream_of

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "examples/chain_sum/model")


def dataset(sizes: dict[str, int], weights: dict[str, float], seed: int = 3, **changes: Any) -> PromptDataset:
    """Rows ``a:0``, ``a:1``, ... of each source, in the order of ``sizes``."""
    rows = [
        DataRow(f"{name}:{i}", f"{i}+{len(name)}=", str(i), limits=PromptLimits(source=name))
        for name, size in sizes.items()
        for i in range(size)
    ]
    limits = {"max_prompt_tokens": 16, "max_new_tokens": 40, "context_length": 256} | changes
    return PromptDataset(rows, TOKENIZER, seed=seed, weights=weights, **limits)


def source(prompt_id: str) -> str:
    return prompt_id.partition(":")[0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.decimals(0.01, 30, places=2).map(float), min_size=2, max_size=6))
def test_every_beginning_of_the_stream_has_the_shares_rounded_up_or_down(weights: list[float]) -> None:
    mix = SourceMix(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    counts = [0] * len(weights)
    for n in range(1, 120):
        index, number = mix.locate(n - 1)
        assert number == counts[index]
        counts[index] += 1
        for i, weight in enumerate(exact):
            assert floor(n * weight / sum(exact)) <= counts[i] <= ceil(n * weight / sum(exact))
        assert [mix.count(i, n) for i in range(len(weights))] == counts


def test_each_source_has_epochs_of_its_own() -> None:
    """0.7, 0.2 and 0.1 of 100 prompts: 7 passes over 10 rows, 4 over 5, and 10 of 40."""
    data = dataset({"a": 10, "b": 5, "c": 40}, {"a": 0.7, "b": 0.2, "c": 0.1})
    drawn = [data[i].prompt_id for i in range(100)]
    for start in range(0, 100, 10):  # also in each step of ten prompts
        assert Counter(map(source, drawn[start : start + 10])) == {"a": 7, "b": 2, "c": 1}
    by_source = {name: [each for each in drawn if source(each) == name] for name in "abc"}
    for name, size in (("a", 10), ("b", 5)):
        passes = [by_source[name][i : i + size] for i in range(0, len(by_source[name]), size)]
        assert all(Counter(each) == Counter(f"{name}:{i}" for i in range(size)) for each in passes)
        assert len({tuple(each) for each in passes}) > 1, "each pass has another order"
    assert len(set(by_source["c"])) == 10
    assert [each.prompt_id for each in data] == [f"{n}:{i}" for n, k in data.sizes.items() for i in range(k)]


def test_a_prompt_of_a_mix_depends_on_seed_and_position_alone() -> None:
    sizes, weights = {"a": 7, "b": 3}, {"a": 0.35, "b": 0.65}
    walked = dataset(sizes, weights)
    stream = [walked[i] for i in range(60)]
    jumped = pickle.loads(pickle.dumps(dataset(sizes, weights)))  # as the other ranks get it
    assert [jumped[i] for i in (59, 0, 31, 30, 7, 58)] == [stream[i] for i in (59, 0, 31, 30, 7, 58)]
    other = dataset(sizes, weights, seed=4)
    assert [source(other[i].prompt_id) for i in range(60)] == [source(each.prompt_id) for each in stream]
    assert [other[i] for i in range(60)] != stream


def test_another_share_is_another_stream() -> None:
    sizes = {"a": 7, "b": 3}
    fingerprints = [dataset(sizes, {"a": a, "b": b}).fingerprint() for a, b in ((1, 3), (0.5, 1.5), (1, 2))]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert fingerprints[0].endswith(", mixed 1 of 7 : 3 of 3")
    assert "mixed" not in dataset(sizes, {}).fingerprint()


def test_a_source_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(DataError, match=r'data\.sources\."bb"'):
        dataset({"a": 3, "bb": 0}, {"a": 1, "bb": 2})


def test_any_data_parallel_size_and_a_resume_draw_the_same_prompts() -> None:
    """Steps of eight prompts, on one rank, on two, and after a checkpoint between steps 2 and 3."""
    sizes, weights = {"a": 6, "b": 9}, {"a": 3, "b": 5}
    data = dataset(sizes, weights)
    expected = [[data[i].prompt_id for i in range(8 * step, 8 * step + 8)] for step in range(5)]
    assert all(Counter(map(source, each)) == {"a": 3, "b": 5} for each in expected)
    assert drawn(run(sizes, weights), 5) == expected
    ranks = [drawn(run(sizes, weights, dp=2, rank=rank), 5) for rank in range(2)]
    assert [[*first, *second] for first, second in zip(*ranks, strict=True)] == expected
    begun = run(sizes, weights)
    assert drawn(begun, 3) == expected[:3]
    resumed = run(sizes, weights)
    resumed.stream.restore(begun.stream.state(), {})
    resumed.step = 3
    assert drawn(resumed, 5) == expected[3:]


def run(sizes: dict[str, int], weights: dict[str, float], dp: int = 1, rank: int = 0) -> Run:
    """One rank of a run of six steps of eight prompts."""
    settings = config(
        run={"output_dir": "out", "num_steps": 6},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 4},
    )
    engine, groups = FakeEngine(), SimpleNamespace(replica=None, dp=None)
    prompts = Positions(dataset(sizes, weights))
    return Run(settings, engine, stream_of(settings, prompts, groups, rank, dp, engine, FakeScorer()))


def drawn(run: Run, until: int) -> list[list[str]]:
    """Prompts of each step."""
    return [[group.prompt.prompt_id for group in each.groups] for each in run.steps(until)]


class Positions:
    """Prompts whose text is their position, as the engine and the scorer expect."""

    def __init__(self, prompts: PromptDataset) -> None:
        self._prompts = prompts

    def __getitem__(self, index: int) -> Prompt:
        return replace(self._prompts[index], text=str(index))


def test_share_and_reward_of_each_source_are_metrics() -> None:
    def group(name: str, *rewards: float) -> RolloutGroup:
        (prompt,) = dataset({name: 1}, {})
        done = Completion(token_ids=ids([1]), logprobs=None, finish_reason="stop", policy_version=0, text="")
        rollouts = tuple(Rollout(prompt=prompt, completion=done, reward=r, reward_failed=r < 0) for r in rewards)
        return RolloutGroup(prompt=prompt, rollouts=rollouts)

    ranks = [[group("a", 0, 1), group("b", 1, 1)], [group("a", 1, -1), group("a", 1, 1)]]
    local = [source_metrics(groups, ["a", "b", "hf:x/y"]) for groups in ranks]
    assert reduce_metrics(local, None) == {
        "source/a/fraction": 3 / 4,
        "source/a/reward": 4 / 5,
        "source/b/fraction": 1 / 4,
        "source/b/reward": 1.0,
        "source/hf_x_y/fraction": 0.0,
    }
