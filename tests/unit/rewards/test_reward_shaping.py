"""Shaping and named parts: worked tables, what training, the log and the evaluation get, impossible values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from columns import ids
from megatron_dppo.errors import ConfigError
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.rewards import RewardItem, RewardScorer, Shaping
from megatron_dppo.rewards.item import soft_overlong_penalty
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run import evaluation
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo.types import Completion, FinishReason, Prompt, PromptLimits, Rollout, RolloutGroup
from megatron_dppo_answers.math import is_well_formed
from tests.unit.configs import config


def test_the_overlong_punishment_is_dapos_table() -> None:
    """Equation 13 with L_max = 20480 and L_cache = 4096 as in the paper, and small numbers worked by hand."""
    table = {0: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20479: -4095 / 4096, 20480: -1.0, 30000: -1.0}
    assert {n: soft_overlong_penalty(n, 20480, 4096) for n in table} == table
    assert [soft_overlong_penalty(n, 10, 4) for n in range(5, 12)] == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


WELL_FORMED = [
    (r"7+8=15 \boxed{15}", True),
    ("so\nAnswer: 15", True),
    (r"<think>maybe \boxed{1}</think>so \boxed{2}", True),
    ("\n<think>\n\n</think>\n\\boxed{2}", True),
    (r"the template opened it</think>\boxed{2}", True),
    ("Answer: 1\n\\boxed{2}", True),
    (r"\boxed{1} no, \boxed{2}", False),
    (r"\boxed{1", False),
    (r"\boxed{}", False),
    ("15", False),
    ("Answer: 1\nAnswer: 2", False),
    (r"<think>never closed \boxed{2}", False),
    (r"<think>a</think><think>b</think>\boxed{2}", False),
    (r"<think>a</think>b</think>\boxed{2}", False),
    (r"\boxed{2}<think>a</think>", False),
    (r"first this <think>a</think>\boxed{2}", False),
    (r"<think><think>a</think>\boxed{2}", False),
    ("", False),
]


@pytest.mark.parametrize(("text", "good"), WELL_FORMED)
def test_well_formed_is_one_answer_after_at_most_one_closed_block(text: str, good: bool) -> None:
    assert is_well_formed(text) is good


def shaped(shaping: Shaping, *items: RewardItem) -> list[Any]:
    scorer = RewardScorer("math", 10.0, 1, shaping=shaping)
    return scorer.score(items)


def item(text: str, tokens: int = 3, finish: str = "stop") -> RewardItem:
    return RewardItem(
        prompt="", completion=text, label="12", metadata={"finish_reason": finish}, token_ids=tuple(range(tokens))
    )


def test_the_reward_is_the_score_plus_its_parts_which_stay_separate() -> None:
    shaping = Shaping(max_new_tokens=10, format=0.25, overlong_buffer_tokens=4, overlong_penalty=2.0)
    right, wrong, long, cut = shaped(
        shaping,
        item(r"\boxed{12}"),
        item(r"\boxed{1} \boxed{11}"),
        item(r"\boxed{12}", tokens=8),
        item(r"\boxed{12}", tokens=10, finish="length"),
    )
    assert right.parts == {"score": 1.0, "format": 0.25, "overlong": 0.0} and right.reward == 1.25
    assert wrong.parts == {"score": 0.0, "format": 0.0, "overlong": 0.0} and wrong.reward == 0.0
    assert long.parts == {"score": 1.0, "format": 0.25, "overlong": -1.0} and long.reward == 0.25
    assert cut.parts == {"score": 0.0, "format": 0.0, "overlong": -2.0} and cut.reward == -2.0
    plain = shaped(Shaping(max_new_tokens=10), item(r"\boxed{12}", tokens=10))
    assert plain[0].parts == {} and plain[0].reward == 1.0


def test_the_length_penalty_ends_at_the_limit_of_the_source() -> None:
    """Five tokens: L_max 10 and L_cache 4 give no penalty, L_max 6 gives (6 - 4 - 5) / 4."""
    scorer = RewardScorer("math", 10.0, 1, shaping=Shaping(max_new_tokens=10, overlong_buffer_tokens=4))
    limits = (None, PromptLimits(source="a"), PromptLimits(source="b", max_new_tokens=6))
    prompts = [Prompt(prompt_id="", text="", token_ids=(1,), label="12", limits=each) for each in limits]
    response = Completion(
        token_ids=ids(range(5)), logprobs=None, finish_reason=FinishReason.STOP, policy_version=0, text=r"\boxed{12}"
    )
    groups = score_completions(scorer, prompts, [response] * 3)
    assert [group.rollouts[0].reward for group in groups] == [1.0, 1.0, 0.25]


def test_a_part_with_the_name_of_a_shaping_part_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(completion): return {'score': 1, 'format': 1} if completion else 1")
    scorer = RewardScorer(f"{file}:f", 10.0, 1, shaping=Shaping(format=0.1))
    clash, fine = scorer.score([item("x"), item("")])
    scorer.close()
    assert clash.failed and "a part 'format'" in clash.error and not fine.failed


def rollout(reward: float, parts: dict[str, float], failed: bool = False) -> Rollout:
    prompt = Prompt(prompt_id="0", text="", token_ids=(1,), label="")
    completion = Completion(token_ids=ids([1, 2]), logprobs=None, finish_reason="stop", policy_version=0, text="")
    return Rollout(prompt=prompt, completion=completion, reward=reward, reward_failed=failed, reward_parts=parts)


def test_parts_are_logged_as_means_over_the_scored_samples_that_have_them() -> None:
    rollouts = (
        rollout(0.5, {"score": 1.0, "overlong": -0.5}),
        rollout(0.0, {"score": 0.0, "overlong": 0.0, "steps": 4.0}),
        rollout(0.0, {"score": 9.0}, failed=True),
    )
    metrics = rollout_metrics([RolloutGroup(prompt=rollouts[0].prompt, rollouts=rollouts)], [])
    result = {name: metric.numerator / metric.denominator for name, metric in metrics.items() if "reward" in name}
    assert result == {
        "reward": 0.25,
        "reward/score": 0.5,
        "reward/overlong": -0.25,
        "reward/steps": 4.0,
        "reward_failed_fraction": 1 / 3,
    }
    assert [r.score for r in rollouts[:2]] == [1.0, 0.0] and rollout(0.7, {}).score == 0.7


def test_evaluation_counts_unshaped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    right = (rollout(0.5, {"score": 1.0, "overlong": -0.5}), rollout(0.1, {"score": 0.0, "format": 0.1}))
    wrong = (rollout(0.1, {"score": 0.0, "format": 0.1}),) * 2
    groups = [RolloutGroup(prompt=right[0].prompt, rollouts=rollouts) for rollouts in (right, wrong)]
    monkeypatch.setattr(evaluation, "reduce_over_samples", lambda _, local: reduce_metrics([local], None))
    settings = config(eval={"samples_per_prompt": 2, "temperature": 1.0})
    stream = SimpleNamespace(submit=lambda *_: None, wait_for=lambda *_: groups)
    prompts = {"": [group.prompt for group in groups]}
    monkeypatch.setattr(evaluation, "write_sample_responses", lambda *_: [])
    parallel = SimpleNamespace(world=None)
    values = evaluation.Evaluator(settings, prompts, stream, parallel, dp=1, dp_rank=0, log=Mock()).evaluate(0)  # type: ignore[arg-type]
    names = ("accuracy", "pass_at_1", "pass_at_2")
    assert [values[f"eval/{name}"] for name in names] == [0.25, 0.25, 0.5]


def test_completions_reach_the_scorer_with_their_length_and_come_back_with_their_parts() -> None:
    settings = config(
        rollout={"max_new_tokens": 8}, reward={"overlong_buffer_tokens": 4, "overlong_penalty": 0.5, "format": 0.1}
    )
    scorer = open_scorer(settings)
    prompt = Prompt(prompt_id="0", text="q", token_ids=(1,), label="12")
    completions = [
        Completion(token_ids=ids([1] * n), logprobs=None, finish_reason="stop", policy_version=0, text=r"\boxed{12}")
        for n in (4, 6)
    ]
    (group,) = score_completions(scorer, [prompt], completions)
    assert [r.reward for r in group.rollouts] == pytest.approx([1.1, 0.85])
    assert [r.score for r in group.rollouts] == [1.0, 1.0]
    assert [dict(r.reward_parts)["overlong"] for r in group.rollouts] == [0.0, -0.25]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"overlong_buffer_tokens": 32},
            "overlong_buffer_tokens = 32 must be below rollout.max_new_tokens = 32",
        ),
        ({"overlong_buffer_tokens": -1}, "reward.overlong_buffer_tokens = -1"),
        ({"overlong_buffer_tokens": 8, "overlong_penalty": -1.0}, "reward.overlong_penalty = -1.0"),
        ({"overlong_penalty": 0.5}, "overlong_penalty = 0.5 has no effect"),
        ({"format": -0.1}, "reward.format = -0.1"),
        ({"format": 1.0}, "reward.format = 1.0"),
        ({"partial_credit": True}, "partial_credit = true applies"),
        ({"signature": "verl"}, "signature = 'verl' applies"),
        ({"signature": "openrlhf"}, "reward.signature = 'openrlhf'"),
        ({"async_concurrency": 0}, "reward.async_concurrency = 0"),
    ],
)
def test_invalid_reward_settings_are_rejected(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(reward=reward)
    assert message in str(error.value)
