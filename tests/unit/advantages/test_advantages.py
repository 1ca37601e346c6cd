"""Group-relative advantages against statistics of the standard library."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megatron_dppo.advantages.baselines import length_weighted_advantages
from megatron_dppo.advantages.by_name import advantages_by
from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.advantages.returns import Moments
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.rewards.item import MAX_REWARD, read_reward
from megatron_dppo.rollout.batch import has_signal
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.run.step import make_samples, refine_advantages
from megatron_dppo.types import Completion, FinishReason, GreedyResponse, Metric, Prompt, Rollout, RolloutGroup
from tests.unit import configs

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, -1.0, 2.0]]


def test_mean_mode_subtracts_the_mean_of_the_siblings() -> None:
    result = group_relative_advantages(torch.tensor(REWARDS, dtype=torch.float64))
    for row, rewards in zip(result.tolist(), REWARDS, strict=True):
        assert row == pytest.approx([r - statistics.fmean(rewards) for r in rewards], abs=1e-12)


def test_std_mode_also_divides_by_the_sample_deviation() -> None:
    result = group_relative_advantages(torch.tensor(REWARDS, dtype=torch.float64), "std")
    for row, rewards in zip(result.tolist(), REWARDS, strict=True):
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        assert row == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], abs=1e-12)


@pytest.mark.parametrize("mode", ["mean", "std"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30])
def test_a_group_without_spread_gives_exactly_zero(mode: str, reward: float) -> None:
    # The fp32 mean of seven times 0.1 is not 0.1.
    assert group_relative_advantages(torch.full((1, 7), reward), mode).tolist() == [[0.0] * 7]


@pytest.mark.parametrize("mode", ["mean", "std"])
def test_failed_samples_get_zero_and_do_not_move_their_siblings(mode: str) -> None:
    rewards = torch.tensor([[1.0, math.nan, 0.0, 0.0, -5.0]])
    valid = torch.tensor([[True, False, True, True, False]])
    result = group_relative_advantages(rewards, mode, valid)
    alone = group_relative_advantages(torch.tensor([[1.0, 0.0, 0.0]]), mode)
    assert result[valid].tolist() == alone[0].tolist()
    assert result[~valid].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["mean", "std"])
@pytest.mark.parametrize("valid", [[[True, False]], [[False, False]]])
def test_groups_with_one_or_no_valid_sample_give_zero(mode: str, valid: list[list[bool]]) -> None:
    result = group_relative_advantages(torch.tensor([[1.0, math.nan]]), mode, torch.tensor(valid))
    assert result.tolist() == [[0.0, 0.0]]


def test_bad_arguments_are_named() -> None:
    rewards = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="'median'"):
        group_relative_advantages(rewards, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        group_relative_advantages(rewards, valid=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        group_relative_advantages(rewards[0])
    with pytest.raises(ValueError, match="int64"):
        group_relative_advantages(rewards.long())
    with pytest.raises(ValueError, match="not finite"):
        group_relative_advantages(torch.tensor([[1.0, math.nan]]))


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_other_valid_samples() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 9.0]], dtype=torch.float64)
    valid = torch.tensor([[True, True, True, False]])
    actual = group_relative_advantages(rewards, "leave_one_out", valid)
    expected = torch.tensor([[1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2, 0.0]], dtype=torch.float64)
    assert torch.allclose(actual, expected, atol=1e-15)


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, 12345678.9, -3e8])
def test_whitening_of_equal_values_is_zero_also_where_rounding_makes_the_variance_negative(value: float) -> None:
    for count in (2, 3, 7, 10, 49):
        values = torch.full((count,), value, dtype=torch.float64)
        assert Moments.of(values).whiten(values).abs().max() < 1e-2
    spread = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    expected = [(x - 7 / 3) / statistics.stdev(spread.tolist()) for x in spread.tolist()]
    parts = Moments.of(spread[:1]) + Moments.of(spread[1:])
    assert parts.whiten(spread).tolist() == pytest.approx(expected, abs=1e-7)
    assert Moments.of(spread[:1]).whiten(spread[:1]).tolist() == [0.0]


def group_of(
    rewards: Sequence[float],
    lengths: Sequence[int],
    masks: Sequence[list[bool] | None],
    parts: Sequence[Mapping[str, float]] = ({}, {}, {}, {}),
) -> RolloutGroup:
    """Four responses to one prompt; a reward that is NaN failed."""
    prompt = Prompt(prompt_id="p", text="", token_ids=(1,), label="")
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            completion=Completion(
                token_ids=torch.zeros(n, dtype=torch.int32),
                logprobs=torch.zeros(n),
                finish_reason=FinishReason.STOP,
                policy_version=0,
                text="",
                loss_mask=None if mask is None else torch.tensor(mask),
            ),
            reward=reward,
            reward_failed=math.isnan(reward),
            reward_parts=each,
        )
        for n, mask, reward, each in zip(lengths, masks, rewards, parts, strict=True)
    )
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def test_opo_weighs_the_baseline_by_the_sampled_tokens() -> None:
    """Responses have 30, 10 and 4 sampled tokens (the third has 9, five of them a tool's); the fourth reward failed."""
    lengths = (30, 10, 9, 50)
    masks = (None, None, [True] * 4 + [False] * 5, None)
    rewards = [2.0, 0.0, 1.0, math.nan]
    group = group_of(rewards, lengths, masks)
    valid = torch.tensor([[True, True, True, False]])
    result = advantages_by("opo", torch.tensor([rewards], dtype=torch.float64), valid, groups=[group])
    baseline = (30 * 2.0 + 10 * 0.0 + 4 * 1.0) / 44
    assert result.tolist() == [pytest.approx([2 - baseline, -baseline, 1 - baseline, 0.0], abs=1e-12)]
    equal = advantages_by("opo", torch.full((1, 4), 0.1), valid, groups=[group])
    assert equal.tolist() == [[0.0] * 4]
    with pytest.raises(ValueError, match="pass groups"):
        advantages_by("opo", torch.ones(1, 4), valid)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1.3, 1e6 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_of_any_lengths_have_no_advantage_at_all(reward: float, dtype: torch.dtype) -> None:
    """Not even the rounding of their weighted mean; the groups have 2 to 17 responses, the first of which failed."""
    noise = 0.0
    for count in range(2, 18):
        lengths = torch.tensor([[7 * i * i + 3 for i in range(count)]])
        valid = torch.tensor([[i > 0 for i in range(count)]])
        rewards = torch.full((1, count), reward, dtype=dtype)
        weighted = (rewards * lengths * valid).sum() / (lengths * valid).sum()
        noise = max(noise, abs(float(weighted - rewards[0, 0])))
        assert length_weighted_advantages(rewards, lengths, valid).tolist() == [[0.0] * count]
    assert noise > 0 or reward == 1e6 + 0.1, "the mean of some group is off by its rounding"


FUNCTIONS = {
    "right": {"function": "math"},
    "terse": {"function": "words", "weight": 0.25},
    "seen": {"function": "words", "weight": 0},
}


def test_gdpo_normalizes_each_part_of_a_reward_by_itself() -> None:
    """Sums are equal in the first group, one reward failed in the second, and a part is constant in the third."""
    right = [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.5, math.nan], [1.0, 1.0, 1.0, 1.0]]
    terse = [[0.0, 4.0, 0.0, 4.0], [3.0, -2.0, 0.0, math.nan], [1.0, 2.0, 3.0, 5.0]]
    bonus = [[0.1, 0.1, 0.1, 0.1], [0.1, 0.0, 0.0, math.nan], [0.0, 0.0, 0.1, 0.0]]
    groups, expected = [], []
    for rows in zip(right, terse, bonus, strict=True):
        rewards = [a + 0.25 * b + c for a, b, c in zip(*rows, strict=True)]
        parts = [
            {} if math.isnan(a) else {"score": a + 0.25 * b, "right": a, "terse": b, "seen": 9.0 * b * a, "format": c}
            for a, b, c in zip(*rows, strict=True)
        ]
        groups.append(group_of(rewards, (3, 1, 2, 5), (None,) * 4, parts))
        scored = 3 if math.isnan(rewards[-1]) else 4
        row = [0.0] * 4
        for weight, values in zip((1.0, 0.25, 1.0), rows, strict=True):
            mean, deviation = statistics.fmean(values[:scored]), statistics.stdev(values[:scored])
            for index in range(scored):
                row[index] += weight * (values[index] - mean) / (deviation + 1e-4)
        expected.append(row)
    reward = RewardConfig.model_validate({"functions": FUNCTIONS, "format": 0.1})
    samples = make_samples(groups, TrainConfig(advantage="gdpo"), reward)
    found = [set(sample.advantages[sample.loss_mask].tolist()) or {0.0} for sample in samples]
    assert all(len(values) == 1 for values in found)
    assert [values.pop() for values in found] == pytest.approx([a for row in expected for a in row], abs=1e-4)
    # Rewards that are summed first have no advantage in the first group.
    plain = make_samples(groups[:1], TrainConfig(advantage="std"), reward)
    assert all(not sample.advantages.any() for sample in plain)
    assert has_signal(groups[0], list(reward.part_weights)) and not has_signal(groups[0])
    assert has_signal(groups[1], list(reward.part_weights))
    assert not has_signal(groups[2], ["right"])


@pytest.mark.parametrize("failed", [False, True])
def test_gdpo_refuses_a_reward_without_one_of_its_parts_unless_it_failed(failed: bool) -> None:
    """A missing part is no part of 0: 0 would be a value below or above its siblings' by chance."""
    parts: list[dict[str, float]] = [{"a": 1.0, "b": 2.0}, {"a": 0.0}, {"a": 1.0, "b": 4.0}, {"a": 0.5, "b": 0.0}]
    group = group_of([1.0, math.nan if failed else 0.0, 2.0, 3.0], (1, 1, 1, 1), (None,) * 4, parts)
    rewards, valid = torch.zeros(1, 4), torch.tensor([[True, not failed, True, True]])
    if failed:
        result = advantages_by("gdpo", rewards, valid, groups=[group], weights={"b": 1.0})
        assert result.tolist() == [pytest.approx([0.0, 0.0, 1.0, -1.0], abs=1e-3)]
    else:
        with pytest.raises(ValueError, match="not finite"):
            advantages_by("gdpo", rewards, valid, groups=[group], weights={"b": 1.0})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "'score' is the only"),
        ({"reward": {"functions": {"right": {"function": "math"}}}}, "'right' is the only"),
        ({"reward": {"format": 0.1, "kl_coef": 0.1}}, "reward.kl_coef"),
        ({"reward": {"format": 0.1}, "rollout": {"generate": "a.py:f"}}, "rollout.generate"),
        ({"reward": {"format": 0.1}, "agent": {"command": ["a"], "reward": "exit"}}, "agent.reward = 'exit'"),
    ],
)
def test_gdpo_needs_a_reward_with_parts(settings: Mapping[str, Mapping[str, object]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configs.config(train={"advantage": "gdpo"}, **settings)
    configs.config(train={"advantage": "gdpo"}, reward={"format": 0.1, "overlong_buffer_tokens": 4})


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    """One group below its baseline, one with a failed sample, one whose greedy reward failed, one of equal rewards."""
    rewards = [[1.0, 0.0, 0.5, 0.0], [2.0, 1.0, math.nan, -1.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    baselines = [1.0, -0.25, math.nan, 0.5]
    expected = [[0.0, -1.0, -0.5, -1.0], [2.25, 1.25, 0.0, -0.75], [0.0] * 4, [0.5] * 4]
    groups = [
        replace(
            group_of(row, (3, 1, 2, 5), (None,) * 4),
            greedy=GreedyResponse(
                reward=0.0 if math.isnan(baseline) else baseline, reward_failed=math.isnan(baseline), num_tokens=4
            ),
        )
        for row, baseline in zip(rewards, baselines, strict=True)
    ]
    samples = make_samples(groups, TrainConfig(advantage="remax"), RewardConfig())
    advantages = [set(sample.advantages[sample.loss_mask].tolist()) or {0.0} for sample in samples]
    assert advantages == [{value} for row in expected for value in row]
    metrics = rollout_metrics(groups, samples)
    assert metrics["greedy_reward"] == Metric(1.25, 3) and metrics["greedy_failed_fraction"] == Metric(1, 4)
    assert metrics["greedy_length"] == Metric(16, 4)
    without = [replace(groups[0], greedy=None), groups[1]]
    with pytest.raises(ValueError, match="greedy response"):
        make_samples(without, TrainConfig(advantage="remax"), RewardConfig())
    assert not any("greedy" in name for name in rollout_metrics(without[:1], samples[:4]))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reward": {"kl_coef": 0.1}}, "reward.kl_coef = 0.1"),
        ({"agent": {"command": ["a"], "reward": "call", "credit": "turn"}}, "agent.credit = 'turn'"),
    ],
)
def test_remax_refuses_what_needs_more_of_the_greedy_response(
    settings: Mapping[str, Mapping[str, object]], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        configs.config(train={"advantage": "remax"}, **settings)
    configs.config(train={"advantage": "remax", "max_staleness": 2}, rollout={"dynamic_sampling": True})


EXTREMES = {
    "the largest": [MAX_REWARD, -MAX_REWARD, MAX_REWARD, 0.0],
    "large, close together": [1e8, 1e8 + 1, 1e8 + 2, 1e8 + 0.5],
    "equal in float32": [2.0**25, 2.0**25 + 1, 2.0**25 + 2, 2.0**25],
    "the smallest": [1e-30, -1e-30, 2e-30, 0.0],
    "of many sizes": [1e20, 1.0, -1e-3, 1e9],
    "almost the mean": [1.0, 0.0, 0.5 + 1e-9, 0.5 - 1e-9],
}


def exact_advantage(name: str, rewards: Sequence[Fraction], lengths: Sequence[int], index: int) -> Fraction:
    """Return an advantage up to a positive factor, by definition and without rounding."""
    if name == "none":
        return rewards[index]
    if name == "leave_one_out":
        return rewards[index] - (sum(rewards) - rewards[index]) / (len(rewards) - 1)
    if name == "opo":
        return rewards[index] - sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return rewards[index] - sum(rewards) / len(rewards)


@pytest.mark.parametrize("normalization", ["none", "batch"])
@pytest.mark.parametrize("name", ["mean", "std", "leave_one_out", "opo", "none"])
def test_advantages_of_accepted_rewards_are_finite_and_keep_their_signs(name: str, normalization: str) -> None:
    """Rewards as functions may return them, among them some that random numbers of ten sizes give."""
    chance = random.Random(1)
    rows = list(EXTREMES.values())
    rows += [[chance.choice((-1, 1)) * 10 ** chance.uniform(-25, 25) for _ in range(4)] for _ in range(200)]
    lengths = (30, 10, 9, 50)
    train = TrainConfig(advantage=name, advantage_normalization=normalization)
    for rewards in rows:
        assert [read_reward(reward)[0] for reward in rewards] == rewards
        group = group_of(rewards, lengths, (None,) * 4)
        samples = make_samples([group], train, RewardConfig())
        exact = [exact_advantage(name, [Fraction(r) for r in rewards], lengths, i) for i in range(4)]
        if normalization == "batch":
            samples = refine_advantages(samples, [group], train, RewardConfig(), group=None)
            # Minus the mean over all tokens: of what the samples have before, which float32 rounds.
            before = [Fraction(float(s.advantages[0])) for s in make_samples([group], train, RewardConfig())]
            mean = sum(a * n for a, n in zip(before, lengths, strict=True)) / sum(lengths)
            exact = [each - mean for each in before]
        got = [float(sample.advantages[0]) for sample in samples]
        assert all(math.isfinite(each) for each in got), (rewards, got)
        scale = max(abs(Fraction(reward)) for reward in rewards)
        for value, right in zip(got, exact, strict=True):
            # Below float64's rounding of the largest reward, a sign may be lost but not turned.
            if abs(right) > scale * Fraction(1e-12):
                assert math.copysign(1, value) == math.copysign(1, right) and value != 0, (rewards, got)
