"""Reward functions of our own form and of slime, verl and TRL: the same numbers, sync and async, and clear refusals."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardResult, RewardScorer, RunInfo
from megatron_dppo.rewards.functions import load
from megatron_dppo.rewards.signatures import call

EXAMPLES = Path(__file__).parents[3] / "examples/rewards"

FORMS = """
import asyncio

def table(text, label, weight):
    return {"score": len(text) + weight * float(label), "length": len(text), "note": "not a number"}

def own(*, prompt, completion, label, metadata):
    return table(completion, label, metadata["weight"])

def slime(args, sample, **kwargs):
    return table(sample.response, sample.label, sample.metadata["weight"])

def slime_batch(args, samples):
    return [slime(args, sample) for sample in samples]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return table(solution_str, ground_truth, extra_info["weight"])

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [verl(*row) for row in zip(data_sources, solution_strs, ground_truths, extra_infos)]

def trl(prompts, completions, weight, **kwargs):
    return [table(*row) for row in zip(completions, kwargs["answer"], weight)]

def make_async(function):
    import functools
    @functools.wraps(function)
    async def wrapped(*args, **kwargs):
        await asyncio.sleep(0)
        return function(*args, **kwargs)
    return wrapped

for name in ("own", "slime", "slime_batch", "verl", "verl_batch", "trl"):
    globals()["async_" + name] = make_async(globals()[name])

class Grader:
    async def __call__(self, *, prompt, completion, label, metadata):
        return table(completion, label, metadata["weight"])
grader = Grader()
"""
NAMES = ["own", "slime", "slime_batch", "verl", "verl_batch", "trl"]


def write(folder: Path, source: str) -> Path:
    file = folder / "forms.py"
    file.write_text(source)
    return file


def run(function: str, items: Sequence[RewardItem], workers: int = 1, **options: Any) -> list[RewardResult]:
    spec = FunctionSpec(function, run_info=RunInfo(label_key="answer"), **options)
    scorer = RewardScorer(spec, 30.0, workers)
    try:
        return scorer.score(items)
    finally:
        scorer.close()


@pytest.mark.parametrize("name", [*NAMES, *(f"async_{name}" for name in NAMES), "grader"])
def test_every_convention_gives_the_same_numbers_sync_and_async_in_order(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, FORMS)
    items = [RewardItem(prompt="p", completion="x" * i, label=str(i), metadata={"weight": 10.0}) for i in range(5)]
    results = run(f"{file}:{name}", items, workers=2 if name in ("own", "trl", "async_verl") else 1)
    assert [r.reward for r in results] == [11.0 * i for i in range(5)]
    assert [r.parts for r in results] == [{"score": 11.0 * i, "length": float(i)} for i in range(5)]
    assert not any(r.failed for r in results) and not multiprocessing.active_children()


EXAMPLE_FUNCTIONS = ["own.py:score", "slime.py:reward", "slime.py:batched_reward", "verl.py:compute_score"]


@pytest.mark.parametrize("name", [*EXAMPLE_FUNCTIONS, "trl.py:reward"])
def test_the_examples_score_answers_as_documented(name: str) -> None:
    texts = [r"7+8=15,15-3=12 \boxed{12}", r"\boxed{11}", "12"]
    chat = [{"role": "user", "content": "7+8-3="}]
    results = run(f"{EXAMPLES}/{name}", [RewardItem(prompt="", completion=t, label="12", messages=chat) for t in texts])
    assert [r.reward for r in results] == [1.0, 0.0, 0.0]
    if name in EXAMPLE_FUNCTIONS:
        assert results[0].parts == {"score": 1.0, "answered": 1.0, "steps": 2.0}
        assert results[2].parts == {"score": 0.0, "answered": 0.0, "steps": 0.0}


def received(source: str, items: Sequence[RewardItem], folder: Path, facts: RunInfo | None = None) -> Any:
    """Return the arguments that a function was called with, in this process."""
    facts = facts or RunInfo()
    loaded = load(FunctionSpec(f"{write(folder, source)}:f", run_info=facts))
    return call(loaded.convention, loaded.function, items, facts)


ITEM = RewardItem(
    prompt="<user>1+1",
    completion="2",
    label="2",
    token_ids=(5, 6, 7),
    messages=({"role": "user", "content": "1+1"},),
    metadata={"data_source": "sums", "extra_info": {"index": 3}, "metadata": {"hard": 1}, "finish_reason": "length"},
)


def test_slime_gets_its_sample_with_status_and_length(tmp_path: Path) -> None:
    args, sample = received(
        "def f(args, sample): return args, sample", [ITEM], tmp_path, RunInfo(slime_args={"reward_key": None})
    )
    assert (sample.prompt, sample.response, sample.label) == ("<user>1+1", "2", "2")
    assert (sample.metadata, sample.response_length) == ({"hard": 1}, 3)
    assert sample.status is sample.Status.TRUNCATED and sample.status.value == "truncated"
    assert args.reward_key is None and getattr(args, "rm_url", "none") == "none"
    with pytest.raises(AttributeError, match=r"args\.rm_url"):
        _ = args.rm_url


def test_verl_gets_the_rows_own_extra_info_or_all_columns(tmp_path: Path) -> None:
    source = "def f(**k): return k\nf.__signature__ = __import__('inspect').signature(lambda solution_str, **k: 0)"
    assert received(source, [ITEM], tmp_path) == {
        "data_source": "sums",
        "solution_str": "2",
        "ground_truth": "2",
        "extra_info": {"index": 3, "finish_reason": "length"},
    }
    plain = RewardItem(prompt="", completion="2", label="2", metadata={"level": 1, "finish_reason": "stop"})
    got = received(source, [plain], tmp_path)
    assert got["data_source"] == "" and got["extra_info"] == {"level": 1, "finish_reason": "stop"}


def test_trl_gets_messages_for_chats_only_and_columns_as_lists(tmp_path: Path) -> None:
    plain = RewardItem(prompt="1+2", completion="3", label="3", metadata={"level": 1})
    got = received(
        "def f(prompts, completions, completion_ids, **columns): return locals()",
        [ITEM, plain],
        tmp_path,
        RunInfo(label_key="answer"),
    )
    assert got["prompts"] == [[{"role": "user", "content": "1+1"}], "1+2"]
    assert got["completions"] == [[{"role": "assistant", "content": "2"}], "3"]
    assert got["completion_ids"] == [[5, 6, 7], []]
    columns = got["columns"]
    assert columns["label"] == columns["answer"] == ["2", "3"]
    assert columns["level"] == [None, 1] and columns["finish_reason"] == ["length", None]


def test_a_function_receives_only_the_arguments_that_it_names(tmp_path: Path) -> None:
    assert received("def f(completion, *, label): return completion, label", [ITEM], tmp_path) == ("2", "2")
    assert received("def f(solution_str, ground_truth): return ground_truth", [ITEM], tmp_path) == "2"
    assert received("def f(completions, data_source): return data_source", [ITEM], tmp_path) == ["sums"]


REFUSED = [
    ("def f(completion, completions): pass", "auto", ["ambiguous", "megatron_dppo", "trl", "reward.signature"]),
    ("def f(args, sample, solution_str): pass", "auto", ["ambiguous", "slime", "verl"]),
    ("def f(args, sample, samples): pass", "slime", ["ambiguous", "sample, **kwargs", "samples, **kwargs"]),
    ("def f(x, y): pass", "auto", ["['x', 'y']", "none of the known signatures", "slime: f(args, sample"]),
    ("def f(**kwargs): pass", "auto", ["none of the known signatures"]),
    ("def f(sample): pass", "auto", ["slime's f(args, sample, **kwargs)", "too many positional arguments"]),
    ("def f(args, sample, *, tool): pass", "auto", ["slime", "missing a required", "argument: 'tool'"]),
    (
        "def f(completion, tool): pass",
        "auto",
        ["megatron_dppo", "do not provide tool", "Give that parameter a default"],
    ),
    ("def f(solution_str, tool): pass", "auto", ["verl", "do not provide tool"]),
    ("def f(completion, /, label): pass", "auto", ["do not provide completion"]),
    ("def f(x, y): pass", "verl", ["verl", "do not provide x, y"]),
    ("f = dict", "auto", ["its parameters cannot be inspected"]),
]


@pytest.mark.parametrize(("source", "signature", "parts"), REFUSED)
def test_an_ambiguous_signature_is_rejected_by_name_before_any_process_starts(
    source: str, signature: str, parts: list[str], tmp_path: Path
) -> None:
    name = f"{write(tmp_path, source)}:f"
    with pytest.raises(RewardError) as error:
        RewardScorer(FunctionSpec(name, signature), 1.0, 1)
    assert all(part in str(error.value) for part in [name, *parts]), error.value


def test_a_named_signature_resolves_ambiguous_functions_and_unusual_names(tmp_path: Path) -> None:
    both = write(tmp_path, "def f(completion='', completions=()): return len(completions) or len(completion)")
    assert load(FunctionSpec(f"{both}:f", "trl")).convention.signature == "trl"
    assert load(FunctionSpec(f"{both}:f", "megatron_dppo")).convention.signature == "megatron_dppo"
    odd = write(tmp_path, "async def f(a, s): return len(s.response)")
    results = run(f"{odd}:f", [RewardItem(prompt="", completion="four", label="")], signature="slime")
    assert results[0].reward == 4.0


def test_a_file_is_loaded_by_its_path_and_problems_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(completion): return A(3).x",
    )
    monkeypatch.chdir(tmp_path)
    assert run("forms.py:f", [RewardItem(prompt="", completion="", label="")])[0].reward == 3.0
    for name, problem in [("nowhere.py:f", "nowhere.py does not exist"), ("forms.py:g", "AttributeError")]:
        with pytest.raises(RewardError, match=problem):
            RewardScorer(name, 1.0, 1)
    write(tmp_path, "1 / 0")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        RewardScorer("forms.py:f", 1.0, 1)
