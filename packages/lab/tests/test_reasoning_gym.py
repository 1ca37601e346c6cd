"""reasoning-gym's problems and scores: the rules here with a stand-in, the real package where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.data.prompts import load_rows
from megatron_dppo.errors import DataError, RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer
from megatron_dppo_lab import reasoning_gym_task as source_module
from megatron_dppo_lab import task_rewards as reward_module

SOURCE = "task:reasoning_gym:chain_sum?size=200&seed=3&max_terms=3"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with the containment credit of the real default scorer, and one task without a single answer."""

    def score(answer: str | None, entry: dict[str, Any]) -> float:
        if entry["answer"] is None:
            return float(answer == "any")
        if not answer or entry["answer"] not in answer:
            return 0.0
        return len(entry["answer"]) / len(answer)

    def create(name: str, size: int, seed: int, **options: Any) -> Any:
        assert name == "chain_sum", f"Dataset '{name}' not registered"
        assert options.get("max_terms", 1) > 0, "max_terms must be positive"
        for i in range(size):
            yield {"question": f"{seed}+{i % 150}", "answer": str(seed + i % 150), "metadata": {"source_dataset": name}}

    package = SimpleNamespace(create_dataset=create, get_score_answer_fn=lambda name: score)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    reward_module.load_scorer.cache_clear()
    yield package
    reward_module.load_scorer.cache_clear()


def score(text: str, label: str = "8", *, partial: bool = False, **columns: Any) -> float:
    metadata = {"source_dataset": "chain_sum"} | columns
    return reward_module.reasoning_gym_reward(text, label, metadata, partial_credit=partial)


def test_only_the_extracted_answer_with_the_full_score_counts(stand_in: Any) -> None:
    assert score(r"\boxed{8}") == 1.0 and score("Answer: 8") == 1.0
    for text in ("8", "the answer is 8", r"\boxed{7 8 9}", r"\boxed{9}", r"8 \boxed{9}", r"\boxed{8", r"\boxed{}"):
        assert score(text) == 0.0, text
    assert score(r"\boxed{8}", finish_reason="length") == 0.0
    assert score(r"\boxed{7 8}", partial=True) == pytest.approx(1 / 3)
    assert score("the answer is 8", partial=True) == 0.0
    assert score(r"\boxed{any}", label="") == 1.0
    assert score(r"\boxed{8}", metadata={"source_dataset": "chain_sum"}) == 1.0
    with pytest.raises(ValueError, match="expected 'source_dataset'"):
        reward_module.reasoning_gym_reward(r"\boxed{8}", "8", {"level": 1})


def check_source() -> None:
    train, held_out = load_rows(SOURCE, "train").rows, load_rows(SOURCE, "eval").rows
    assert train == load_rows(SOURCE, "train").rows, "the same seed gives the same problems"
    questions = [{row.metadata["question"] for row in rows} for rows in (train, held_out)]
    assert len(questions[0]) == len(train) and questions[0] and questions[1] and not questions[0] & questions[1]
    assert train != load_rows(SOURCE.replace("seed=3", "seed=4"), "train").rows
    assert train[0].prompt == train[0].metadata["question"] + source_module.INSTRUCTION
    chat = load_rows(SOURCE + "&chat=true&instruction=false", "train").rows
    assert chat[0].prompt == [{"role": "user", "content": chat[0].metadata["question"]}]


def check_refusals() -> None:
    for source, message in [
        ("task:reasoning_gym:no_such_task", "'no_such_task' not registered"),
        (SOURCE + "&max_terms=-1", "AssertionError"),
        (SOURCE + "&chat=1", "chat must be true or false, got 1"),
        (SOURCE.replace("size=200", "size=1"), "has no problem for the eval split; raise size"),
    ]:
        with pytest.raises(DataError, match=message):
            load_rows(source, "eval")


def test_the_source_is_deterministic_with_disjoint_splits(stand_in: Any) -> None:
    check_source()
    check_refusals()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RewardError, match=r"megatron-dppo\[reasoning-gym\].*C compiler"):
        RewardScorer("reasoning_gym", 10.0, 1)
    with pytest.raises(DataError, match=r"megatron-dppo\[reasoning-gym\].*C compiler"):
        load_rows(SOURCE, "train")


def test_the_real_package_creates_problems_and_scores_them_in_a_worker(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra [reasoning-gym] is not installed (it needs a C compiler)")
    check_source()
    check_refusals()
    rows = load_rows(SOURCE, "train").rows[:3]
    items = [
        RewardItem(prompt=str(row.prompt), completion=text.format(row.label), label=row.label, metadata=row.metadata)
        for row in rows
        for text in (r"\boxed{{{}}}", "the answer is {}", r"\boxed{{0 {}}}")
    ]
    scorer = RewardScorer(FunctionSpec("reasoning_gym"), 60.0, 1)
    assert [r.reward for r in scorer.score(items)] == [1.0, 0.0, 0.0] * 3
    scorer.close()
    entry = {"question": "1+1", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}
    (tmp_path / "gym.jsonl").write_text(json.dumps(entry) + "\n")
    (row,) = load_rows(str(tmp_path / "gym.jsonl"), "train", prompt_key="question", label_key="answer").rows
    assert reward_module.reasoning_gym_reward(r"\boxed{2}", row.label, row.metadata) == 1.0
