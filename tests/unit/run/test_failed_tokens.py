"""Tokens of failed rewards: they leave the loss mask, N, and every term of the loss, unless a teacher trains them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.training_samples import pack
from megatron_dppo.losses import BatchTotals, policy_loss
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.policy.update import add_token_weights
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.run.step import add_distillation_advantages, make_samples, refine_advantages
from megatron_dppo.types import Completion, FinishReason, LossInputs, Metric, Prompt, Rollout, RolloutGroup
from tests.unit.configs import config

FAILED = math.nan
REWARDS = [[1.0, FAILED, 0.0], [FAILED, 2.0, -1.0], [FAILED, FAILED, 1.0]]
"""Four of nine failed; one group has a single reward."""
LENGTHS = [[3, 3, 3], [3, 3, 3], [3, 3, 3]]


def groups_of(rewards: list[list[float]] = REWARDS, lengths: list[list[int]] = LENGTHS) -> list[RolloutGroup]:
    """Groups whose failed rewards are NaN here; token ids and log-probabilities differ at each token."""
    generator = torch.Generator().manual_seed(1)
    prompt = Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
    return [
        RolloutGroup(
            prompt=prompt,
            rollouts=tuple(
                Rollout(
                    prompt=prompt,
                    completion=Completion(
                        token_ids=torch.randint(5, (length,), generator=generator, dtype=torch.int32),
                        logprobs=-torch.rand(length, generator=generator) - 1,
                        finish_reason=FinishReason.STOP,
                        policy_version=0,
                        text="",
                    ),
                    reward=0.0 if math.isnan(reward) else reward,
                    reward_failed=math.isnan(reward),
                )
                for reward, length in zip(row, row_lengths, strict=True)
            ),
        )
        for row, row_lengths in zip(rewards, lengths, strict=True)
    ]


def test_their_share_is_the_dropped_fraction() -> None:
    samples = make_samples(groups_of(), TrainConfig(), RewardConfig())
    assert rollout_metrics(groups_of(), samples)["dropped_token_fraction"] == Metric(12, 27)
    trained = [sample.num_loss_tokens for sample in samples]
    assert trained == [0 if math.isnan(reward) else 3 for row in REWARDS for reward in row]
    # By tokens, not by responses.
    long = [[9, 1, 9], [1, 9, 9], [1, 1, 9]]
    samples = make_samples(groups_of(lengths=long), TrainConfig(), RewardConfig())
    assert rollout_metrics(groups_of(lengths=long), samples)["dropped_token_fraction"] == Metric(4, 49)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("advantage", ["mean", "none"])
def test_the_loss_is_that_of_a_batch_without_them(aggregation: str, advantage: str) -> None:
    """Value and gradient against a sum in float64 over the responses with a reward, written out here."""
    lengths = [[4, 2, 3], [5, 1, 2], [2, 6, 3]]
    groups = groups_of(lengths=lengths)
    samples = make_samples(groups, TrainConfig(advantage=advantage), RewardConfig())
    generator = torch.Generator().manual_seed(2)
    reference = [-torch.rand(sample.num_tokens, generator=generator) - 1 for sample in samples]
    samples = [replace(sample, reference_logprobs=row) for sample, row in zip(samples, reference, strict=True)]
    batch = pack(samples)
    assert batch.rollout_logprobs is not None and batch.reference_logprobs is not None
    # Near mu, so that no token is masked.
    noise = 0.05 * torch.randn(len(batch.labels), 5, generator=generator, dtype=torch.float64)
    logits = torch.zeros(len(batch.labels), 5, dtype=torch.float64) + noise
    logits[torch.arange(len(batch.labels)), batch.labels] += 0.5
    logits.requires_grad_()
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, batch.labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = LossConfig(name="pg_is", kl_coef=0.1, entropy_coef=0.03, aggregation=aggregation)
    totals = BatchTotals(
        num_tokens=sum(sample.num_loss_tokens for sample in samples),
        num_sequences=sum(sample.num_loss_tokens > 0 for sample in samples),
    )
    weighted = add_token_weights(batch, totals, loss)
    output = policy_loss(
        LossInputs(
            logprobs=logprobs,
            advantages=batch.advantages.double(),
            loss_mask=batch.loss_mask,
            rollout_logprobs=batch.rollout_logprobs.double(),
            reference_logprobs=batch.reference_logprobs.double(),
            entropy=entropy,
            sequence_ids=batch.sequence_ids,
            token_weights=weighted.token_weights,
        ),
        loss,
    )
    value = output.loss_sum / totals.num_tokens
    (gradient,) = torch.autograd.grad(value, logits)

    expected = torch.zeros((), dtype=torch.float64)
    own = logits.detach().clone().requires_grad_()
    scored = [(g, i) for g, row in enumerate(REWARDS) for i, reward in enumerate(row) if not math.isnan(reward)]
    total = sum(lengths[g][i] for g, i in scored)
    start = 0
    is_failed = torch.zeros(len(own), dtype=torch.bool)
    for g, row in enumerate(REWARDS):
        known = [reward for reward in row if not math.isnan(reward)]
        for i, reward in enumerate(row):
            length = lengths[g][i]
            first, end = start + 1, start + 1 + length  # a prompt of two tokens has one label
            start = end
            if math.isnan(reward):
                is_failed[first:end] = True
                continue
            sibling_mean = 0.0 if advantage == "none" else sum(known) / len(known)
            advantage_of_one = reward - sibling_mean if len(known) > 1 or advantage == "none" else 0.0
            completion = groups[g].rollouts[i].completion
            weight = 1 / total if aggregation == "token_mean" else 1 / (len(scored) * length)
            for t in range(length):
                log_q = own[first + t].log_softmax(-1)
                log_pi = log_q[int(completion.token_ids[t])]
                assert completion.logprobs is not None
                ratio = math.exp(float(log_pi) - float(completion.logprobs[t]))
                gap = log_pi - float(reference[3 * g + i][1 + t])
                kl = torch.exp(-gap) - 1 + gap
                token = -advantage_of_one * min(ratio, loss.ratio_cap or math.inf) * log_pi
                token = token + 0.1 * kl + 0.03 * (log_q.exp() * log_q).sum()
                expected = expected + weight * token
    (expected_gradient,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert bool(is_failed.any()) and not gradient[is_failed].any(), "neither KL nor entropy trains them"


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1}])
@pytest.mark.parametrize("advantage", ["mean", "leave_one_out"])
def test_siblings_have_the_advantages_of_a_group_without_them(settings: dict[str, Any], advantage: str) -> None:
    train, reward = TrainConfig(advantage=advantage), RewardConfig(**settings)

    def refined(rewards: list[list[float]], groups: list[RolloutGroup]) -> list[Tensor]:
        samples = [
            replace(each, reference_logprobs=torch.full((each.num_tokens,), -1.5))
            for each in make_samples(groups, train, reward)
        ]
        return [each.advantages for each in refine_advantages(samples, groups, train, reward, group=None)]

    groups = groups_of()[:2]
    alone = [
        RolloutGroup(prompt=group.prompt, rollouts=tuple(r for r in group.rollouts if not r.reward_failed))
        for group in groups
    ]
    scored = [not r.reward_failed for group in groups for r in group.rollouts]
    with_failed = refined(REWARDS[:2], groups)
    for row, ok in zip(with_failed, scored, strict=True):
        assert ok or not row.any()
    expected = refined([], alone)
    kept = [row for row, ok in zip(with_failed, scored, strict=True) if ok]
    assert len(kept) == 4 and all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_a_teacher_trains_them() -> None:
    """The teacher's signal does not depend on the reward, so the tokens stay in the loss."""
    distillation = config(distillation={"teacher_path": "teacher"}).distillation
    samples = make_samples(groups_of(), TrainConfig(), RewardConfig(), has_teacher=True)
    assert all(sample.num_loss_tokens == 3 for sample in samples)
    taught = [replace(each, teacher_logprobs=torch.full((each.num_tokens,), -0.5)) for each in samples]
    (first, failed, *_) = add_distillation_advantages(taught, distillation)
    assert failed.rollout_logprobs is not None
    expected = torch.where(failed.loss_mask, -0.5 - failed.rollout_logprobs, 0.0)
    torch.testing.assert_close(failed.advantages, expected)
    assert bool((first.advantages[first.loss_mask] != 0).all())


def test_a_step_without_any_reward_has_no_token() -> None:
    """Every episode of an agent may fail with ``agent.max_failed_fraction = 1``."""
    groups = groups_of([[FAILED] * 3], LENGTHS[:1])
    samples = make_samples(groups, TrainConfig(), RewardConfig())
    assert sum(sample.num_loss_tokens for sample in samples) == 0
    assert rollout_metrics(groups, samples)["dropped_token_fraction"] == Metric(9, 9)
    assert not pack(samples).loss_mask.any()


def test_the_surprise_allows_for_their_selection() -> None:
    """A reward may fail on some contents only, so the rest is not a random sample of the policy's tokens."""
    settings = config(rollout={"engine": "sglang", "servers": {"urls": ["http://a"]}, "samples_per_prompt": 3})
    state = GuardState.from_config(settings.rollout, settings.train)
    collected = CollectedRollouts(groups=groups_of(), ages=[0], dropped_groups={}, token_ages={0: 1})
    assert state.begin_step(settings, ParallelGroups(), collected, {}).selection.responses == pytest.approx(4 / 9)
    taught = config(
        rollout={"engine": "sglang", "servers": {"urls": ["http://a"]}, "samples_per_prompt": 3},
        distillation={"teacher_path": "teacher"},
    )
    assert state.begin_step(taught, ParallelGroups(), collected, {}).selection.responses == 0.0
