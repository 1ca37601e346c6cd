"""Failures in an async function, in a batch or in a returned table cost their own samples only."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardResult, RewardScorer

FUNCTIONS = """
import asyncio, os, time

def value(text):
    if text == "raise":
        raise ValueError("boom")
    if text == "exit":
        os._exit(7)
    if text == "block":
        time.sleep(600)
    special = {
        "none": None,
        "text": "0.5",
        "nan": float("nan"),
        "no score": {"accuracy": 1.0},
        "two scores": {"score": 1.0, "reward": 1.0},
        "nan part": {"score": 1.0, "length": float("inf")},
        "text score": {"score": "1.0"},
    }
    return special[text] if text in special else {"score": 1.0, "part": 2.0}

async def concurrent(*, prompt, completion, label, metadata):
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "cancel":
        raise asyncio.CancelledError
    if completion == "own limit":
        raise TimeoutError("the grader did not answer")
    await asyncio.sleep(0.1)
    return value(completion)

def single(*, prompt, completion, label, metadata):
    return value(completion)

def batch(prompts, completions, **columns):
    return [value(text) for text in completions]

async def async_batch(args, samples):
    await asyncio.sleep(0)
    return [value(sample.response) for sample in samples]

def short(completions):
    return [1.0] * (len(completions) - (len(completions) > 1))

def whole(completions):
    return 1.0

def hidden(*, prompt, completion, label, metadata):
    return concurrent(prompt=prompt, completion=completion, label=label, metadata=metadata)
"""
BAD = {
    "raise": "ValueError: boom",
    "exit": "died (exit code 7)",
    "none": "the reward must be a number, got None",
    "text": "the reward must be a number, got '0.5'",
    "nan": "the reward must be a finite number, got nan",
    "no score": "exactly one of 'score' and 'reward' in a reward table, got ['accuracy']",
    "two scores": "exactly one of 'score' and 'reward' in a reward table, got ['reward', 'score']",
    "nan part": "the part 'length' must be a finite number, got inf",
    "text score": "the score must be a number, got '1.0'",
}


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "failing.py").write_text(FUNCTIONS)
    return tmp_path / "failing.py"


def run(function: str, texts: list[str], timeout: float = 30.0, concurrency: int = 64) -> list[RewardResult]:
    scorer = RewardScorer(FunctionSpec(function), timeout, 1, async_concurrency=concurrency)
    try:
        return scorer.score([RewardItem(prompt="", completion=text, label="") for text in texts])
    finally:
        scorer.close()


def check(texts: list[str], results: list[RewardResult], errors: dict[str, str]) -> None:
    for text, result in zip(texts, results, strict=True):
        if text in errors:
            assert result.failed and result.reward == 0.0 and not result.parts
            assert errors[text] in result.error, (text, result)
        else:
            assert (result.failed, result.reward, result.parts) == (False, 1.0, {"score": 1.0, "part": 2.0})
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "batch", "async_batch", "concurrent", "hidden"])
def test_bad_samples_affect_only_themselves_in_every_calling_convention(name: str, functions: Path) -> None:
    texts = ["a", *BAD, "b", "c"]
    check(texts, run(f"{functions}:{name}", texts), BAD)


@pytest.mark.parametrize("name", ["single", "batch", "async_batch", "concurrent", "whole"])
def test_the_error_has_file_and_line_also_for_a_wrong_value(name: str, functions: Path) -> None:
    """The named line is the one that raises, or else that of the function that returned the value."""
    lines = FUNCTIONS.splitlines()
    texts = ["a"] if name == "whole" else ["a", "none", "raise"]
    results = run(f"{functions}:{name}", texts)
    defined = next(number for number, line in enumerate(lines, start=1) if f"def {name}(" in line)
    raised = lines.index('        raise ValueError("boom")') + 1
    assert results[-1].error.endswith(f"(at {functions}:{raised})") or name == "whole"
    wrong = results[0 if name == "whole" else 1].error
    assert wrong.startswith("TypeError: ") and wrong.endswith(f"(returned by {name}, {functions}:{defined})")


def test_an_async_function_runs_samples_concurrently_each_with_its_own_limit(functions: Path) -> None:
    texts = ["a", "hang", "hang", "cancel", "own limit", *"bcdefghijklmnopqrstuvwxyz"]
    errors = {
        "hang": "took longer than reward.timeout_seconds = 1 and was stopped",
        "cancel": "CancelledError",
        "own limit": "TimeoutError: the grader did not answer",
    }
    scorer = RewardScorer(FunctionSpec(f"{functions}:concurrent"), 1.0, 1)
    scorer.score([RewardItem(prompt="", completion="start the process", label="")])
    started = time.monotonic()
    results = scorer.score([RewardItem(prompt="", completion=text, label="") for text in texts])
    took = time.monotonic() - started
    scorer.close()
    check(texts, results, errors)
    assert took < 4.6, "one after the other they take at least 0.1 s each and 1 s for those that hang: 4.7 s"


@pytest.mark.slow
def test_a_coroutine_that_blocks_its_loop_is_killed_and_the_other_samples_are_retried(functions: Path) -> None:
    texts = ["a", "b", "block", "c"]
    check(texts, run(f"{functions}:concurrent", texts, timeout=0.4), {"block": "took longer than"})


def test_a_hanging_batch_is_split_until_the_bad_sample_is_alone(functions: Path) -> None:
    texts = ["a", "b", "c", "block"]
    check(texts, run(f"{functions}:batch", texts, timeout=0.4), {"block": "took longer than"})


def test_a_list_of_another_length_is_retried_in_halves_and_other_types_stop_the_run(functions: Path) -> None:
    assert [r.reward for r in run(f"{functions}:short", ["a", "b", "c"])] == [1.0, 1.0, 1.0]
    with pytest.raises(RewardError, match=r"first error: TypeError: .*got 1\.0"):
        run(f"{functions}:whole", ["a", "b"])


def test_small_concurrency_gives_the_same(functions: Path) -> None:
    texts = ["a", "raise", "b", "c", "d"]
    check(texts, run(f"{functions}:concurrent", texts, concurrency=2), BAD)


KINDS = """
import fractions, numpy, torch

def score(completion, label, **_):
    return eval(label)
"""
WRONG = ["None", "'1.0'", "b'1'", "(1.0,)", "[1.0]", "numpy.ones(2)", "torch.ones(2)", "1j", "{}", "{'accuracy': 1}"]
WRONG += ["{'score': None}", "{'score': 1, 'reward': 1}", "len", "object()", "(x for x in 'a')", "fractions", "{1.0}"]
RIGHT = [
    "1",
    "True",
    "0.5",
    "numpy.float16(1)",
    "torch.ones(())",
    "fractions.Fraction(1, 3)",
    "{'score': 1, 'part': 'x'}",
]
BY_ANSWER = ["float('nan')", "1 / 0", "len(3)", "int('a')", "{'score': float('inf')}"]


def test_only_a_value_of_the_wrong_type_is_marked(tmp_path: Path) -> None:
    """Errors that depend on the answer are not marked: a quotient by zero, a text that is no number."""
    file = tmp_path / "kinds.py"
    file.write_text(KINDS)
    scorer = RewardScorer(f"{file}:score", timeout_seconds=60, num_workers=1)
    items = [RewardItem(prompt="", completion="", label=label) for label in (*WRONG, *RIGHT, *BY_ANSWER)]
    results = dict(zip((*WRONG, *RIGHT, *BY_ANSWER), scorer.score(items), strict=True))
    scorer.close()
    assert [label for label, result in results.items() if result.is_wrong_type] == WRONG
    assert [label for label, result in results.items() if not result.failed] == RIGHT
    for label in WRONG:
        assert results[label].error.endswith(f" (returned by score, {file}:4)"), results[label].error
    assert results["len(3)"].error.endswith(")") and "returned by" not in results["len(3)"].error
