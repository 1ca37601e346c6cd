"""Options of reward functions, and several functions: the weighted sum, failures, the log, the evaluation, refusals."""

from __future__ import annotations

import multiprocessing
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from columns import ids
from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.run.evaluation import eval_metrics
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.setup.changes import change_kind
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo.types import Completion, Prompt
from tests.unit.configs import config, minimal

FUNCTIONS = """
import asyncio, pathlib, time

def own(completion, *, factor, offset=0.0):
    return {"score": len(completion) * factor + offset, "letters": len(completion)}

def slime(args, sample, **kwargs):
    return kwargs["factor"] * len(sample.response)

def slime_needs(args, sample, factor):
    return factor * len(sample.response)

def verl(solution_str, ground_truth, factor=1.0):
    return factor * len(solution_str)

def trl(completions, factor, **columns):
    return [factor * len(text) for text in completions]

def right(completion, label):
    if completion == "fails":
        raise ValueError("boom")
    return float(completion == label)

async def slow(completion):
    await asyncio.sleep(0.6)
    return 0.0

def also_slow(completion):
    time.sleep(0.6)
    return 0.0

async def first(completion):
    return await asyncio.to_thread(meet, "first", "second")

def second(completion):
    return meet("second", "first")

def meet(own, other):
    folder = pathlib.Path(__file__).parent
    (folder / own).touch()
    end = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < end, f"{other} has not begun"
        time.sleep(0.01)
    return 0.0

def broken(completion):
    raise KeyError("nothing works")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "several.py").write_text(FUNCTIONS)
    return f"{tmp_path}/several.py"


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem(prompt="", completion=text, label="12") for text in texts]


@pytest.mark.parametrize("name", ["own", "slime", "slime_needs", "verl", "trl"])
def test_options_reach_a_function_of_every_convention_by_name(name: str, file: str) -> None:
    scorer = RewardScorer(FunctionSpec(f"{file}:{name}", options={"factor": 0.5}), 30.0, 1)
    assert [result.reward for result in scorer.score(items("a", "bcd"))] == [0.5, 1.5]
    scorer.close()


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("own", {}, ["do not provide factor", "a value in reward.options"]),
        ("own", {"factor": 1.0, "faktor": 2.0}, ["reward.options has 'faktor'", "accepts: factor, offset"]),
        ("own", {"factor": 1.0, "completion": "x"}, ["'completion'", "receives from the sample"]),
        ("slime_needs", {}, ["missing a required", "argument: 'factor'", "reward.options"]),
        ("slime_needs", {"factor": 1.0, "args": 1}, ["reward.options has 'args'", "accepts: factor"]),
        ("verl", {"label": 1}, ["reward.options has 'label'", "accepts: factor"]),
        ("right", {"factor": 1}, ["reward.options has 'factor'", "accepts: none"]),
    ],
)
def test_unknown_and_missing_options_are_rejected_at_the_start(
    name: str, options: dict[str, Any], parts: list[str], file: str
) -> None:
    with pytest.raises(RewardError) as error:
        open_scorer(config(reward={"function": f"{file}:{name}", "options": options}))
    assert all(part in str(error.value) for part in [f"several.py:{name}", *parts]), error.value


def test_an_option_that_is_also_a_column_fails_with_its_name(file: str) -> None:
    scorer = RewardScorer(FunctionSpec(f"{file}:trl", options={"factor": 0.5}), 30.0, 1)
    rows = [RewardItem(prompt="", completion="a", label="", metadata={"factor": 2.0})] * 2
    with pytest.raises(RewardError, match="'factor'"):
        scorer.score(rows)
    scorer.close()


def several(file: str, **functions: dict[str, Any]) -> Config:
    for each in functions.values():
        each["function"] = f"{file}:{each['function']}" if each["function"] not in ("math", "words") else "math"
    return config(reward={"functions": functions, "format": 0.25, "timeout_seconds": 20.0})


def scored(settings: Config, *texts: str) -> Any:
    scorer = open_scorer(settings)
    prompt = Prompt(prompt_id="0", text="q", token_ids=(1,), label="12")
    completions = [
        Completion(token_ids=ids([1]), logprobs=None, finish_reason="stop", policy_version=0, text=text)
        for text in texts
    ]
    try:
        return score_completions(scorer, [prompt], completions)[0]
    finally:
        scorer.close()
        assert not multiprocessing.active_children()


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_with_the_shaping_once_and_all_is_logged(file: str) -> None:
    settings = several(
        file,
        right={"function": "right", "weight": 2.0},
        length={"function": "own", "weight": -0.125, "options": {"factor": 1.0, "offset": 1.0}},
        logged={"function": "trl", "weight": 0.0, "options": {"factor": 3.0}},
    )
    group = scored(settings, "12", r"\boxed{12}", "fails")
    first, second, third = group.rollouts
    assert first.reward_parts == {
        "score": 2.0 - 0.125 * 3,
        "right": 1.0,
        "length": 3.0,
        "length/letters": 2.0,
        "logged": 6.0,
        "format": 0.0,
    }
    assert first.reward == first.score == 1.625
    assert second.reward == -0.125 * 11 + 0.25 and second.score == -1.375
    assert third.reward_failed and third.reward == 0.0 and not third.reward_parts
    metrics = rollout_metrics([group], [])
    result = {name: m.numerator / m.denominator for name, m in metrics.items() if name.startswith("reward")}
    assert result == pytest.approx(
        {
            "reward": (1.625 - 1.125) / 2,
            "reward/score": (1.625 - 1.375) / 2,
            "reward/right": 0.5,
            "reward/length": 7.0,
            "reward/length/letters": 6.0,
            "reward/logged": 18.0,
            "reward/format": 0.125,
            "reward_failed_fraction": 1 / 3,
        }
    )


def test_a_weighted_sum_beyond_the_largest_reward_fails(file: str) -> None:
    settings = several(
        file,
        first={"function": "own", "weight": 1.0, "options": {"factor": 5e29}},
        second={"function": "own", "weight": -1.5, "options": {"factor": 0.0, "offset": -5e29}},
    )
    inside, beyond = scored(settings, "", "1").rollouts
    assert (inside.reward, inside.reward_failed) == (pytest.approx(7.5e29), False)
    assert beyond.reward_failed and beyond.reward == 0.0


def test_evaluation_uses_the_sum_or_the_function_marked_eval(file: str) -> None:
    functions = {"math": {"function": "math"}, "fragile": {"function": "right", "weight": 0.5}}
    texts = (r"\boxed{12}", "fails", "12", r"\boxed{11}")
    plain = scored(several(file, **{name: dict(each) for name, each in functions.items()}), *texts)
    assert [r.score for r in plain.rollouts] == [1.0, 0.0, 0.5, 0.0]
    functions["math"]["eval"] = True
    marked = scored(several(file, **functions), *texts, r"\boxed{12} fails")
    assert [r.score for r in marked.rollouts] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [r.reward for r in marked.rollouts[:4]] == [1.25, 0.0, 0.5, 0.25]
    assert eval_metrics([marked], 5)["accuracy"].numerator == 2.0


def test_a_function_marked_eval_counts_even_if_another_one_fails(file: str) -> None:
    group = scored(several(file, r={"function": "right"}, v={"function": "verl", "eval": True}), "fails", "12")
    assert [(r.reward_failed, r.score) for r in group.rollouts] == [(True, 5.0), (False, 2.0)]


@pytest.mark.slow
def test_functions_run_concurrently_each_with_its_own_limit(file: str) -> None:
    settings = several(
        file,
        a={"function": "slow"},
        b={"function": "also_slow"},
        c={"function": "also_slow", "timeout_seconds": 0.2, "weight": 3.0},
    )
    scorer = open_scorer(settings)
    assert scorer.description == "[reward.functions] (a, b, c)"
    with pytest.raises(RewardError, match=r"reward\.functions\.c\.function = .*also_slow"):
        scorer.score(items("x", "y"))
    scorer.close()
    without = open_scorer(several(file, a={"function": "first"}, b={"function": "second"}))
    (result,) = without.score(items("x"), is_batch=False)
    without.close()
    assert not result.failed, f"one after the other they never meet: {result.error}"


def test_a_function_that_always_fails_stops_the_run_and_is_named(file: str) -> None:
    scorer = open_scorer(several(file, good={"function": "right"}, bad={"function": "broken"}))
    with pytest.raises(RewardError, match=r"reward\.functions\.bad\.function = .* all 2"):
        scorer.score(items("12", "13"))
    scorer.close()


def test_without_labels_functions_that_need_them_are_rejected(file: str) -> None:
    values = minimal()
    values["data"]["label_key"] = ""
    values["reward"] = {"functions": {"a": {"function": f"{file}:slow"}, "b": {"function": "math"}}}
    with pytest.raises(RewardError, match=r"reward\.functions\.b\.function = 'math'"):
        open_scorer(validate(values, "test"))
    del values["reward"]["functions"]["b"]
    open_scorer(validate(values, "test")).close()


MATH = {"function": "math"}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "words", "functions": {"a": MATH}}, "function = 'words' and [reward.functions.NAME] exclude"),
        ({"function": "math", "functions": {"a": MATH}}, "exclude each other"),
        ({"functions": {"a": MATH}, "options": {"x": 1}}, "reward.options belongs to reward.function"),
        ({"functions": {"a": MATH}, "signature": "trl"}, "reward.signature belongs to reward.function"),
        ({"functions": {"score": MATH}}, "the function name 'score'"),
        ({"functions": {"a/b": MATH}}, "the function name 'a/b'"),
        ({"functions": {"a": MATH | {"eval": True}, "b": MATH | {"eval": True}}}, "set for a and b"),
        ({"functions": {"a": MATH | {"weight": 0.0}}}, "every weight is 0"),
        (
            {"functions": {"a": MATH | {"options": {"x": 1}}}},
            "options.x: unknown option; function = 'math'",
        ),
        ({"functions": {"a": MATH | {"signature": "trl"}}}, "signature = 'trl' applies"),
        ({"functions": {"a": MATH | {"zzz": 1}}}, "reward.functions.a.zzz = 1: unknown key; known"),
        ({"functions": {"a": MATH | {"wieght": 1.0}}}, "did you mean 'weight'?"),
        ({"functions": {"a": {"weight": 1.0}}}, "reward.functions.a.function is missing"),
        ({"function": ""}, "function = '' without [reward.functions.NAME]"),
        ({"options": {"x": 1}}, "options.x: unknown option; function = 'math'"),
        ({"function": "reasoning_gym", "options": {"partial_credit": 1}}, "options.partial_credit = 1: Input should"),
    ],
)
def test_invalid_settings_of_several_functions_are_rejected(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(reward=reward)
    assert message in str(error.value), error.value


def test_function_paths_resolve_against_their_toml_and_survive_a_round_trip(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, k): return k")
    text = '[reward.functions.a]\nfunction = "mine.py:f"\nweight = 0.5\noptions = {k = 1.0}\n'
    (tmp_path / "run.toml").write_text(dump_toml(config()).replace("[reward]", "[rewards]") + text)
    values = tomllib.loads((tmp_path / "run.toml").read_text())
    values.pop("rewards")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(values))
    read = load_config(tmp_path / "run.toml", ["--reward.functions.a.weight", "0.25"])
    assert read.reward.functions["a"].function == str(tmp_path / "mine.py:f")
    assert read.reward.functions["a"].weight == 0.25 and read.reward.function == ""
    assert validate(tomllib.loads(dump_toml(read)), "again") == read
    open_scorer(read).close()


def test_a_resume_distinguishes_function_keys_that_change_results() -> None:
    free = ["timeout_seconds", "num_workers", "async_concurrency"]
    assert {change_kind(f"reward.functions.a.{key}") for key in free} == {"free"}
    for key in ("reward.functions.a.weight", "reward.functions.a.options.prompt", "reward.options.model"):
        assert change_kind(key) == "results"


SOURCES = {
    "data": {"train": ["x/sums.jsonl", "x/code.jsonl"], "eval": {"held": "x/held.jsonl"}},
    "reward": {"timeout_seconds": 20.0},
}


def test_functions_score_the_rows_of_their_sources(file: str) -> None:
    """Sums get 1 or 0, code gets half its length, and all lose a tenth of theirs. One failure stays with its row."""
    functions = {
        "right": {"function": f"{file}:right", "sources": ["sums.jsonl", "held.jsonl"]},
        "code": {"function": f"{file}:verl", "sources": ["code.jsonl"], "options": {"factor": 0.5}},
        "short": {"function": f"{file}:own", "weight": -0.1, "options": {"factor": 1.0}},
    }
    scorer = open_scorer(config(data=SOURCES["data"], reward={**SOURCES["reward"], "functions": functions}))
    rows = [("sums", "12"), ("code", "abcd"), ("held", "1"), ("sums", "fails"), ("code", "ab"), ("sums", "3")]
    results = scorer.score([RewardItem(prompt="", completion=t, label="12", source=f"{s}.jsonl") for s, t in rows])
    scorer.close()
    assert [result.failed for result in results] == [False, False, False, True, False, False]
    assert [result.reward for result in results] == pytest.approx([0.8, 1.6, -0.1, 0.0, 0.8, -0.1])
    assert results[0].parts.keys() & {"right", "code"} == {"right"}
    assert results[1].parts.keys() & {"right", "code"} == {"code"}


def test_a_function_that_fails_on_all_rows_of_its_source_stops_the_run(file: str) -> None:
    functions = {
        "right": {"function": f"{file}:right", "sources": ["sums.jsonl", "held.jsonl"]},
        "code": {"function": f"{file}:broken", "sources": ["code.jsonl"]},
    }
    scorer = open_scorer(config(data=SOURCES["data"], reward={**SOURCES["reward"], "functions": functions}))
    item = RewardItem(prompt="", completion="12", label="12", source="sums.jsonl")
    code = RewardItem(prompt="", completion="12", label="12", source="code.jsonl")
    # One failed row is no proof.
    assert [result.failed for result in scorer.score([item, code, item])] == [False, True, False]
    with pytest.raises(RewardError, match=r"reward\.functions\.code\.function"):
        scorer.score([item, code, code])
    scorer.close()


@pytest.mark.parametrize(
    ("sources", "advantage", "part"),
    [
        (["sum.jsonl"], "std", "data.train or data.eval; they are 'sums.jsonl'"),
        (["sums.jsonl", "held.jsonl"], "std", "the source 'code.jsonl'"),
        (["sums.jsonl", "code.jsonl"], "std", "the source 'held.jsonl'"),
        (["sums.jsonl", "code.jsonl", "held.jsonl"], "gdpo", "reward.functions.one.sources: a part of a reward"),
    ],
)
def test_sources_that_cannot_be_scored_are_refused(sources: list[str], advantage: str, part: str) -> None:
    functions = {
        "one": {"function": "math", "sources": sources},
        "logged": {"function": "math", "weight": 0.0},
        "other": {"function": "math", "sources": ["sums.jsonl"]},
    }
    with pytest.raises(ConfigError) as error:
        config(data=SOURCES["data"], reward={"functions": functions}, train={"advantage": advantage})
    assert part in str(error.value)
