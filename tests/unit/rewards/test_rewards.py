from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer, extract_answer, math_reward, scoring
from megatron_dppo.rewards import worker as worker_module
from megatron_dppo.rewards.item import read_reward
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup

USER_FUNCTIONS = """
import os, time

def score(*, prompt, completion, label, metadata):
    if completion == "hang":
        time.sleep(600)
    if completion == "slow":
        time.sleep(8)
    if completion == "raise":
        raise ValueError("boom")
    if completion == "exit":
        os._exit(7)
    special = {"text": "0.5", "none": None, "nan": float("nan")}
    return special[completion] if completion in special else metadata["value"] + len(prompt) + len(label)

def broken(*, prompt, **rest):
    raise KeyError("nothing works")

number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "user_rewards_for_test.py").write_text(USER_FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "user_rewards_for_test"
    import sys

    sys.modules.pop("user_rewards_for_test", None)


def item(completion: str, label: str = "12", **metadata: Any) -> RewardItem:
    return RewardItem(prompt="", completion=completion, label=label, metadata=metadata)


def scored(function: str, items: list[RewardItem], timeout: float = 30.0, workers: int = 1) -> list[Any]:
    scorer = RewardScorer(function, timeout, workers)
    try:
        return scorer.score(items)
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a^{b_{c}}} and } more", "a^{b_{c}}"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> it is 1", None),
        (r"\boxed{1} then \boxed{2", None),
        ("Answer: 7", "7"),
        ("Answer: 7\nso\n  answer:  $8$ \nbye", "8"),
        ("**Answer:** 9", "9"),
        ("**Answer: 9**", "9"),
        ("Answer: 1\n\\boxed{2}", "2"),
        ("Answer: 12} and 13", None),
        ("the answer is 12", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_box_or_the_last_answer_line(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


EQUAL = [("12", "12"), ("025", "25"), ("25", "025"), ("+12", "12"), ("-0", "0"), ("-012", "-12"), ("x", "x")]
DIFFERENT = [("13", "12"), ("-12", "12"), ("120", "12"), ("9" * 5000, "12")]
PARSED = [(r"\frac12", "0.5", 1.0), ("0.5", r"\frac{1}{2}", 1.0), ("2x+1", "1+2x", 1.0), ("1,000", "1000", 1.0)]
HIDDEN = ["11=12", "12=11", "11==12", "11:=12", r"11\equiv 12", r"11\to 12", r"11 \Rightarrow 12", r"11\therefore 12"]
HIDDEN += [r"11 \\ 12", r"11\lor 12", r"11\unknown 12", "11.\n12", "11,=12", "x=11, x=12", "n=11=12", "11&=12"]
EQUATIONS = [("x=12", "12"), ("12", "x = 12"), (r"\theta_{1} = 12", "12"), (r"k=\frac34", "3/4"), ("f(x)=1+2x", "2x+1")]
EQUATIONS += [("(x,y)=(1,2)", "(1,2)"), ("y=1+2x", "y=2x+1"), ("1=y^2+x^2", "x^2+y^2=1"), ("2x+1", "y=2x+1")]
UNEQUAL = [("x=11", "12"), ("11=12", "x=12"), (r"x=11\to 12", "x=12"), ("5=1", "x^2+y^2=1"), ("z=2x+1", "y=2x+1")]
NOT_CONTAINED = ["1, 12", r"\{1, 12\}", "12 or 13", "12 13", "the answer is 12", "[0, 100]", "", "12, 12.5"]


def test_plain_answers_are_scored_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker_module.Worker, "submit", refuse)
    cases = [(f"\\boxed{{{a}}}", label, 1.0) for a, label in EQUAL]
    cases += [(f"\\boxed{{{a}}}", label, 0.0) for a, label in DIFFERENT]
    cases += [("no box at all, 12", "12", 0.0), ("Answer: 12", "12", 1.0)]
    results = scored("math", [item(text, label) for text, label, _ in cases])
    assert [r.reward for r in results] == [expected for _, _, expected in cases]
    assert not any(r.failed for r in results)
    assert not multiprocessing.active_children()


def test_a_truncated_completion_scores_nothing_for_math() -> None:
    right = r"\boxed{12}"
    results = scored("math", [item(right, finish_reason="length"), item(right, finish_reason="stop")])
    assert [r.reward for r in results] == [0.0, 1.0]
    assert math_reward(prompt="", completion=right, label="12", metadata={"finish_reason": "length"}) == 0.0


@pytest.mark.slow
def test_other_answers_are_compared_in_a_worker_and_never_by_containment() -> None:
    cases = [(f"\\boxed{{{a}}}", label, expected) for a, label, expected in PARSED]
    cases += [(f"\\boxed{{{a}}}", "12", 0.0) for a in NOT_CONTAINED]
    cases += [("Answer: 12} and 13", "12", 0.0), (r"\boxed{12}", "12", 1.0), (r"\boxed{12}", "1, 12", 0.0)]
    results = scored("math", [item(text, label) for text, label, _ in cases], workers=2)
    assert [(c[0], r.reward) for c, r in zip(cases, results, strict=True)] == [(c[0], c[2]) for c in cases]
    assert not any(r.failed for r in results), [r.error for r in results]


def test_an_equation_counts_by_its_right_side_after_a_bare_name_only() -> None:
    """math-verify takes every one of HIDDEN for 12."""
    cases = [(answer, "12", 0.0) for answer in HIDDEN]
    cases += [(a, label, 1.0) for a, label in EQUATIONS] + [(a, label, 0.0) for a, label in UNEQUAL]
    results = scored("math", [item(f"\\boxed{{{a}}}", label) for a, label, _ in cases])
    assert [(c[0], c[1], r.reward) for c, r in zip(cases, results, strict=True)] == cases
    assert not any(r.failed for r in results), [r.error for r in results]


def test_an_unclosed_last_box_scores_nothing() -> None:
    texts = [r"\boxed{12", r"\boxed{12} so \boxed{12", "Answer: 12\n\\boxed{12", r"\boxed{\frac{12}{1}"]
    assert [r.reward for r in scored("math", [item(text) for text in texts])] == [0.0] * 4


def test_importing_the_parser_does_not_count_against_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Channel:
        def send(self, place: object, outcome: object, **end: bool) -> None:
            events.append(f"sent {end}")

        def receive(self) -> None:
            raise EOFError

    monkeypatch.setattr(scoring, "load_parser", lambda: events.append("loaded"))
    scoring.score_chunks(FunctionSpec("math"), 1.0, Channel(), None)  # type: ignore[arg-type]
    assert events == ["loaded", "sent {'is_end': True}"]


def test_a_bad_sample_affects_only_itself_and_order_is_preserved(user_module: str) -> None:
    names = ["a", "hang", "b", "raise", "exit", "c", "text", "none", "nan", "d"]
    items = [
        RewardItem(prompt="p", completion=name, label="l" * i, metadata={"value": 0.5}) for i, name in enumerate(names)
    ]
    started = time.monotonic()
    results = scored(f"{user_module}:score", items, timeout=1.0, workers=2)
    assert time.monotonic() - started < 60
    expected_errors = {
        "hang": "took longer than reward.timeout_seconds = 1",
        "raise": "ValueError: boom",
        "exit": "died (exit code 7)",
        "text": "must be a number, got '0.5'",
        "none": "must be a number, got None",
        "nan": "must be a finite number, got nan",
    }
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        if name in expected_errors:
            assert result.failed and result.reward == 0.0 and expected_errors[name] in result.error, result
        else:
            assert not result.failed and result.error == "" and result.reward == 1.5 + i
    assert not multiprocessing.active_children()


def test_the_time_limit_of_a_sample_does_not_wait_for_other_samples(user_module: str) -> None:
    items = [item(name, value=0.0) for name in ("hang", "slow", "fine")]
    results = scored(f"{user_module}:score", items, timeout=1.0, workers=2)
    assert [r.failed for r in results] == [True, True, False]


def test_a_function_that_fails_on_every_sample_stops_the_run_with_its_error(user_module: str) -> None:
    name = f"{user_module}:broken"
    with pytest.raises(RewardError, match=f"{name}.*KeyError: 'nothing works'"):
        scored(name, [item("x"), item("y"), item("z")])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("maths", ["'maths'", "'module:function'"]),
        ("no_such_module_here:f", ["ModuleNotFoundError", "PYTHONPATH"]),
        ("user_rewards_for_test:missing", ["AttributeError", "missing"]),
        ("user_rewards_for_test:number", ["not callable", "int"]),
    ],
)
def test_a_function_that_cannot_be_loaded_is_rejected_at_once(user_module: str, name: str, parts: list[str]) -> None:
    with pytest.raises(RewardError) as error:
        RewardScorer(name, 1.0, 1)
    assert all(part in str(error.value) for part in [name, *parts]), error.value


def test_a_function_that_loads_only_in_the_parent_is_rejected_with_the_reason(
    user_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = RewardScorer(f"{user_module}:score", 1.0, 1)
    (tmp_path / f"{user_module}.py").write_text("import a_module_that_is_not_installed")
    with pytest.raises(RewardError, match=r"worker process: .*a_module_that_is_not_installed"):
        scorer.score([item("x")])
    assert not multiprocessing.active_children()


def test_importing_torch_does_not_count_against_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples reach a scoring process as plain data: on a busy machine torch takes longer than a sample may."""
    (tmp_path / "heavy.py").write_text(
        "import sys\ndef score(*, prompt, completion, label, metadata):\n"
        "    return {'score': 1.0, 'torch': float('torch' in sys.modules)}\n"
    )
    prompt = Prompt(prompt_id="0", text="1+1=", token_ids=(1, 2), label="2", metadata={"level": 3})
    completion = Completion(
        policy_version=0,
        token_ids=torch.tensor([5, 6], dtype=torch.int32),
        logprobs=torch.zeros(2),
        text="2",
        finish_reason=FinishReason.STOP,
    )
    scorer = RewardScorer(FunctionSpec(f"{tmp_path / 'heavy.py'}:score"), timeout_seconds=60, num_workers=1)
    (group,) = score_completions(scorer, [prompt], [completion, completion])
    scorer.close()
    assert [rollout.reward_parts["torch"] for rollout in group.rollouts] == [0.0, 0.0]


def test_a_reward_has_a_bounded_number_of_parts() -> None:
    parts = {f"part{i}": 1.0 for i in range(256)}
    assert read_reward({"score": 0.5, **parts, "answer": "text"}) == (0.5, parts)
    with pytest.raises(ValueError, match="at most 256 parts"):
        read_reward({"score": 0.5, **parts, "one more": 0})


def test_a_step_has_a_bounded_number_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Each sample has a part of its own name, as a function that names parts after samples gives it."""
    prompt = Prompt(prompt_id="0", text="", token_ids=(1,), label="")
    completion = Completion(
        token_ids=torch.tensor([5], dtype=torch.int32),
        text="",
        finish_reason=FinishReason.STOP,
        logprobs=torch.zeros(1),
        policy_version=0,
    )
    rollouts = [
        Rollout(prompt=prompt, completion=completion, reward=1.0, reward_parts={f"part{i:03d}": float(i)})
        for i in range(300)
    ]
    metrics = rollout_metrics([RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))], [])
    parts = {name: metric.numerator for name, metric in metrics.items() if name.startswith("reward/")}
    assert parts == {f"reward/part{i:03d}": float(i) for i in range(256)}
    assert "300 differently named parts" in capsys.readouterr().err
