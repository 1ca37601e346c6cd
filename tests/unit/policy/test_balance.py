"""Dealing samples to micro-batches: what every dealing keeps, and how near to the best it comes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from megatron_dppo.config.layout import ModelShape, resolve_parallel
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.balance import RowAssignment, assign_samples
from megatron_dppo.data.training_samples import RowShape, to_training_sample
from megatron_dppo.policy import update
from megatron_dppo.policy.packed import attention_length, packing_units
from megatron_dppo.policy.update import Updater
from megatron_dppo.types import TrainingSample

QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
)
SQUARE = attention_length(QWEN3_30B_A3B)


def efficiency(rows: RowAssignment, costs: Sequence[float], together: int) -> float:
    """Useful cost over what all ranks could do in the time of the slowest group of ``together`` ranks."""
    times = []
    for first in range(0, len(rows), together):
        group = rows[first : first + together]
        times.append(sum(max(sum(costs[i] for i in mine[k]) for mine in group) for k in range(len(rows[0]))))
    return sum(costs) / (len(rows) * max(times))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    ranks=st.integers(1, 8),
    budget=st.integers(1, 80),
    attention=st.sampled_from([1.0, 20.0, 1e9]),
    together=st.integers(1, 8),
    multiple=st.integers(1, 3),
)
def test_every_dealing_is_whole_and_within_the_budget(
    lengths: list[int], ranks: int, budget: int, attention: float, together: int, multiple: int
) -> None:
    def dealt() -> RowAssignment:
        return assign_samples(lengths, ranks, budget, attention_length=attention, lockstep=together, multiple=multiple)

    rows = dealt()
    assert rows == dealt()
    assert sorted(i for mine in rows for row in mine for i in row) == list(range(len(lengths)))
    assert len(rows) == ranks and len({len(mine) for mine in rows}) == 1 and len(rows[0]) % multiple == 0
    assert all(len(row) < 2 or sum(lengths[i] for i in row) <= budget for mine in rows for row in mine)
    assert sum(any(mine) for mine in rows) == min(ranks, len(lengths))


def test_a_worked_case() -> None:
    # Two ranks, 10 tokens a row: the 8 stands against the 8 of the other rank, and the rest share a second row each.
    lengths = [8, 3, 3, 3, 8, 3]
    rows = assign_samples(lengths, 2, 10, attention_length=1e9, lockstep=2)
    assert [[sorted(lengths[i] for i in row) for row in mine] for mine in rows] == [[[8], [3, 3]], [[8], [3, 3]]]


def log_normal(rng: random.Random, count: int) -> list[int]:
    """Answers of about 6k tokens on average, cut off at 16,384, behind prompts of 200."""
    return [200 + min(16384, int(4550 * math.exp(0.8 * rng.gauss(0, 1)))) + 1 for _ in range(count)]


def test_64_ranks_in_lockstep_waste_less_than_a_twentieth() -> None:
    by_cost, tokens, by_tokens = [], [], []
    for seed in range(3):
        lengths = log_normal(random.Random(seed), 512)
        rows = assign_samples(lengths, 64, 17408, attention_length=SQUARE, lockstep=4)
        assert len(rows[0]) == -(-sum(lengths) // (64 * 17408))
        by_cost.append(efficiency(rows, [n + n * n / SQUARE for n in lengths], 4))
        tokens.append(efficiency(rows, lengths, 4))
        by_tokens.append(
            efficiency(assign_samples(lengths, 64, 17408, attention_length=1e12, lockstep=64), lengths, 64)
        )
    assert min(by_cost) >= 0.95 and min(by_tokens) >= 0.98 and sum(tokens) / 3 >= 0.95, (by_cost, tokens, by_tokens)


def longest_first(costs: Sequence[float], lengths: Sequence[int], ranks: int, budget: int) -> RowAssignment:
    """Each sample to the rank with the least so far, then first-fit decreasing on each rank."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(owned, key=lambda mine: sum(costs[j] for j in mine)).append(i)
    rows: RowAssignment = []
    for mine in owned:
        bins: list[list[int]] = []
        for i in mine:
            fits = [row for row in bins if sum(lengths[j] for j in row) + lengths[i] <= budget]
            fits[0].append(i) if fits else bins.append([i])
        rows.append(bins)
    count = max(map(len, rows))
    return [bins + [[]] * (count - len(bins)) for bins in rows]


DISTRIBUTIONS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "uniform": lambda rng, n: [rng.randint(1, 16384) for _ in range(n)],
    "equal": lambda rng, n: [rng.choice([500, 6000, 9000])] * n,
    "bimodal": lambda rng, n: [rng.choice([300, 16000]) for _ in range(n)],
    "rare and long": lambda rng, n: [16000 if rng.random() < 0.03 else rng.randint(50, 400) for _ in range(n)],
    "heavy tail": lambda rng, n: [min(16384, int(300 * rng.paretovariate(1.1))) for _ in range(n)],
    "log-normal": log_normal,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_it_is_no_worse_than_longest_first_on_any_distribution(name: str) -> None:
    gains = []
    for ranks, each, together in itertools.product((2, 8, 16), (1, 2, 8, 24), (1, 4, 16)):
        if ranks % together:
            continue
        lengths = DISTRIBUTIONS[name](random.Random(f"{ranks}/{each}"), ranks * each)
        costs = [n + n * n / SQUARE for n in lengths]
        plain = efficiency(longest_first(costs, lengths, ranks, 17408), costs, together)
        found = efficiency(
            assign_samples(lengths, ranks, 17408, attention_length=SQUARE, lockstep=together), costs, together
        )
        assert found > min(0.999 * plain, 0.995), (ranks, each, together, found, plain)
        gains.append(found / plain)
    assert name == "equal" or max(gains) > 1.01, gains


def test_a_few_samples_are_dealt_as_well_as_they_can_be() -> None:
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 20) for _ in range(6)]
        best = max(
            efficiency([[[i for i in range(6) if owner[i] == rank]] for rank in range(2)], lengths, 2)
            for owner in itertools.product(range(2), repeat=6)
        )
        assert efficiency(assign_samples(lengths, 2, 1000, attention_length=1e9, lockstep=2), lengths, 2) > 0.9 * best


def dense(intermediate: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=700,
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def test_attention_costs_as_much_as_all_matrices_at_this_length() -> None:
    # Multiplications of a sequence of n tokens. Matrices: 4 layers of queries and output (64 x 128), keys and values
    # (64 x 64) and three of 64 x 96, then the head. Attention: two products of 4 heads of 32 with n / 2 positions.
    n = attention_length(dense(96))
    matrices = n * (4 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 96) + 64 * 700)
    assert 4 * 2 * (4 * 32) * n * (n / 2) == pytest.approx(matrices)


def test_experts_cost_what_a_token_visits() -> None:
    shape = {k: v for k, v in dense(96).to_dict().items() if k in ("vocab_size", "hidden_size", "num_hidden_layers")}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 80}
    shape |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    visited, routers = attention_length(dense(3 * 16)), 8 * 64 / (4 * 32)
    assert attention_length(Qwen3MoeConfig(**shape)) == pytest.approx(visited + routers)
    mixed = Qwen3MoeConfig(**shape, mlp_only_layers=[0, 2])
    half = (attention_length(dense(80)) + visited + routers) / 2
    assert attention_length(mixed) == pytest.approx(half)
    shared = Qwen2MoeConfig(**{**shape, "head_dim": 32}, shared_expert_intermediate_size=24, qkv_bias=True)
    assert attention_length(shared) == pytest.approx(attention_length(dense(3 * 16 + 24)) + routers)
    assert pytest.approx(15_471, abs=1) == SQUARE


def test_which_ranks_meet_follows_from_the_layout() -> None:
    shape = ModelShape(
        family="qwen3_moe",
        num_layers=4,
        num_attention_heads=8,
        num_query_groups=4,
        num_experts=16,
        hidden_size=64,
        vocab_size=64,
    )

    def lockstep(world: int, **sizes: Any) -> int:
        return resolve_parallel(ParallelConfig(**sizes), world, shape).lockstep_ranks

    assert lockstep(16) == 1
    assert lockstep(16, tensor_model_parallel_size=2, expert_model_parallel_size=8) == 4
    assert lockstep(16, tensor_model_parallel_size=4, expert_model_parallel_size=4) == 1
    assert lockstep(16, tensor_model_parallel_size=4, expert_model_parallel_size=2) == 1
    assert lockstep(16, expert_model_parallel_size=4, pipeline_model_parallel_size=2) == 4
    assert lockstep(16, context_parallel_size=2, expert_model_parallel_size=16) == 8


def test_every_rank_packs_the_rows_that_were_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, ranks, budget = random.Random(5), 3, 40
    held = [[to_training_sample([1], [1] * rng.randint(1, 30), None, 0.0) for _ in range(5)] for _ in range(ranks)]
    layout = SimpleNamespace(lockstep_ranks=3, micro_batch_multiple=1)
    shape = RowShape(sequence_multiple=4)
    trainer: Any = SimpleNamespace(layout=layout, row_shape=shape, attention_length=50.0)
    updater = Updater(trainer, TrainConfig(micro_batch_tokens=budget), LossConfig())
    sent: list[list[list[TrainingSample]]] = []
    group: Any = object()
    units = [[(shape.padded(sample.num_tokens), 1) for sample in samples] for samples in held]
    monkeypatch.setattr(update, "all_gather_objects", lambda value, _: units)
    monkeypatch.setattr(update, "all_to_all_objects", lambda outgoing, _: sent.append(outgoing))
    bins = []
    for rank in range(ranks):
        monkeypatch.setattr("megatron_dppo.policy.update.dist.get_rank", lambda _, rank=rank: rank)
        bins.append(updater.balance(held[rank], group)[1])
    received = [[s for outgoing in sent for s in outgoing[rank]] for rank in range(ranks)]
    lengths = [shape.padded(s.num_tokens) for mine in held for s in mine]
    dealt = assign_samples(lengths, ranks, budget, attention_length=50.0, lockstep=3)
    flat = [s for mine in held for s in mine]
    for mine, rows, expected in zip(received, bins, dealt, strict=True):
        assert [[id(mine[i]) for i in row] for row in rows] == [[id(flat[i]) for i in row] for row in expected]


def test_a_loss_of_sequences_gets_all_segments_of_an_episode_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, ranks = random.Random(6), 2
    held: list[list[TrainingSample]] = [[], []]
    for rank, samples in enumerate(held):
        for episode in range(4):
            for segment in range(rng.randint(1, 4)):
                sample = to_training_sample([1], [1] * rng.randint(1, 30), None, 0.0)
                samples.append(replace(sample, segment=segment, number=10 * rank + episode))
    layout = SimpleNamespace(lockstep_ranks=1, micro_batch_multiple=1)
    trainer: Any = SimpleNamespace(layout=layout, row_shape=RowShape(), attention_length=50.0)
    updater = Updater(trainer, TrainConfig(micro_batch_tokens=40), LossConfig(name="gspo"))
    units = [
        [(unit.num_tokens, len(unit.indices)) for unit in packing_units(samples, RowShape(), joins_segments=True)]
        for samples in held
    ]
    assert [len(each) for each in units] == [4, 4]
    monkeypatch.setattr(update, "all_gather_objects", lambda value, _: units)
    sent: list[list[list[TrainingSample]]] = []
    monkeypatch.setattr(update, "all_to_all_objects", lambda outgoing, _: sent.append(outgoing))
    bins = []
    for rank in range(ranks):
        monkeypatch.setattr("megatron_dppo.policy.update.dist.get_rank", lambda _, rank=rank: rank)
        bins.append(updater.balance(held[rank], object())[1])  # type: ignore[arg-type]
    seen: list[tuple[int, int]] = []
    for rank, rows in enumerate(bins):
        received = [s for outgoing in sent for s in outgoing[rank]]
        for row in rows:
            names = [(received[i].number, received[i].segment) for i in row]
            # Each episode is whole, and its segments are in order and next to each other.
            assert [segment for _, segment in names] == [
                segment
                for number in dict.fromkeys(n for n, _ in names)
                for segment in range(sum(n == number for n, _ in names))
            ]
            seen += names
    assert sorted(seen) == sorted((s.number, s.segment) for samples in held for s in samples)
