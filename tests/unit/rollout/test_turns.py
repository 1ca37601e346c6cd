"""Responses of several turns: what is sampled, what is given, and what of it is trained on."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from columns import mask, same
from fake_servers import END, SHAPE, VOCAB, FakeServer, logprob, routes
from megatron_dppo.data.training_samples import to_samples, to_training_sample
from megatron_dppo.engines import server_engine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import ConfigError, GenerateError
from megatron_dppo.rewards.item import RewardResult
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.rollout.turns import Turns, load_generate
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.types import Completion, Prompt, RolloutGroup, VersionSpan
from megatron_dppo_engines.route_checks import is_missing
from tests.unit.configs import config
from tests.unit.engines.test_server_engine import FakeTokenizer, params, prompt, publish

ROOT = Path(__file__).parents[3]
STOP = 9


@pytest.fixture
def server() -> FakeServer:
    """Stops for the tool at position 5, and ends at position 12 of the whole sequence."""
    return FakeServer("http://s:0", sample=lambda request, position: {5: STOP, 12: END}.get(position, 7))


def engine_with(function: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> ServerEngine:
    monkeypatch.setattr(server_engine, "routing_shape", lambda config: SHAPE)
    engine = ServerEngine(
        [server],  # type: ignore[list-item]
        FakeTokenizer(),
        SimpleNamespace(vocab_size=VOCAB, eos_token_id=END),
        max_in_flight=8,
        health_seconds=1,
        function=function,
    )
    publish(engine, [server], 4)
    return engine


@pytest.fixture
def run(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engines = []

    def call(function: Any, tokens: int = 30, **settings: Any) -> Completion:
        engines.append(engine_with(function, server, monkeypatch))
        return engines[-1].generate([prompt(0)], params(tokens, **settings))[0]

    yield call
    for engine in engines:
        engine.close()


async def with_tool(prompt: Prompt, turns: Turns) -> Completion:
    turn = await turns.sample(stop_token_ids=[STOP])
    assert turn.token_ids == (7, 7, STOP) and turn.finish_reason == "stop" and turn.text == "7,7,9"
    assert turns.append("ab") == 2 and turns.append([50]) == 1
    await turns.sample()
    return turns.finish()


def test_tool_tokens_are_masked_and_columns_stay_aligned(run: Any, server: FakeServer) -> None:
    found = run(with_tool, topk_logprobs=2, routed_experts=True)
    assert found.token_ids.tolist() == [7, 7, STOP, 97, 98, 50, 7, 7, 7, END] and found.finish_reason == "stop"
    assert same(found.loss_mask, mask([True] * 3 + [False] * 3 + [True] * 4))
    url = "http://s:0"
    assert found.policy_versions == (VersionSpan(4, 0, 3, url), VersionSpan(4, 6, 10, url))
    assert found.policy_version == 4
    assert found.logprobs.tolist() == [
        logprob(3 + i, token, 4) if found.loss_mask[i] else 0.0 for i, token in enumerate(found.token_ids.tolist())
    ]
    assert found.topk_token_ids.shape == (10, 3) and found.topk_token_ids[3:6].eq(-1).all()
    assert (found.topk_token_ids[found.topk_token_ids[:, 0] >= 0, 0] >= 0).sum() == 7
    assert torch.equal(found.routed_experts, routes(0, 12, 4))
    second = server.requests[1]
    assert second.token_ids == (100, 7, 8, 7, 7, STOP, 97, 98, 50), "exactly the tokens before it, never text"
    assert second.routing_start == 5 and second.params.max_new_tokens == 24
    assert second.stop_token_ids == (END,)


def test_routes_of_final_tool_tokens_are_missing(run: Any) -> None:
    async def ends_with_a_tool(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(stop_token_ids=[STOP])
        turns.append([50, 51])
        return turns.finish()

    found = run(ends_with_a_tool, routed_experts=True)
    assert found.routed_experts.shape == (7, 2, 2)
    assert is_missing(found.routed_experts).all(1).tolist() == [False] * 5 + [True] * 2


def test_a_response_never_gets_longer_than_allowed_and_counts_as_cut_off(run: Any, server: FakeServer) -> None:
    async def too_much(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(stop_token_ids=[STOP])
        assert turns.tokens_left == 2 and turns.append("abc") == 2 and turns.tokens_left == 0
        empty = await turns.sample()
        assert empty.token_ids == () and empty.finish_reason == "length"
        return turns.finish()

    found = run(too_much, 5)
    assert len(found.token_ids) == 5 and found.finish_reason == "length" and len(server.requests) == 1


def test_a_turn_has_a_limit_of_its_own(run: Any) -> None:
    async def short(prompt: Prompt, turns: Turns) -> Completion:
        assert (await turns.sample(max_new_tokens=2)).finish_reason == "length"
        assert (await turns.sample(max_new_tokens=20)).finish_reason == "stop"
        return turns.finish()

    found = run(short)
    assert found.loss_mask is None and found.policy_versions == (VersionSpan(4, 0, 10, "http://s:0"),)


def test_tool_tokens_are_excluded_from_loss_and_counts(run: Any) -> None:
    found = run(with_tool, topk_logprobs=2)

    class Scorer:
        def score(self, items: Any, *, is_batch: bool) -> list[Any]:
            return [RewardResult(reward=float(i)) for i, _ in enumerate(items)]

    groups = score_completions(Scorer(), [prompt(0)], [found, found])  # type: ignore[arg-type]
    samples = to_samples(groups, [[-0.5, 0.5]])
    for sample, advantage in zip(samples, (-0.5, 0.5), strict=True):
        trained = [False, False, *found.loss_mask.tolist()]
        assert sample.loss_mask.tolist() == trained
        assert sample.advantages.tolist() == [advantage if on else 0.0 for on in trained]
        assert sample.rollout_logprobs is not None and not sample.rollout_logprobs[~sample.loss_mask].any()
        assert sample.labels[sample.loss_mask].tolist() == [7, 7, STOP, 7, 7, 7, END]
    metrics = {k: m.numerator / m.denominator for k, m in rollout_metrics(groups, samples).items()}
    assert metrics["dropped_token_fraction"] == 0 and metrics["given_token_fraction"] == 0.3
    with pytest.raises(ValueError, match="loss mask for 2"):
        to_training_sample([1], [2, 3], None, 0.0, sampled=[True])


def test_a_reward_of_the_function_is_kept_and_other_responses_are_scored(run: Any) -> None:
    async def rewarded(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample()
        return turns.finish(reward=0.25)

    async def plain(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample()
        return turns.finish()

    class Scorer:
        def score(self, items: Any, *, is_batch: bool) -> list[Any]:
            assert len(items) == 1
            return [RewardResult(reward=7.0)]

    (group,) = score_completions(Scorer(), [prompt(0)], [run(rewarded), run(plain)])  # type: ignore[arg-type]
    assert [r.reward for r in group.rollouts] == [0.25, 7.0]


def test_completions_of_several_turns_survive_a_file(run: Any, tmp_path: Path) -> None:
    found, sibling = (run(with_tool, topk_logprobs=1, routed_experts=True) for _ in range(2))

    class Scorer:
        def score(self, items: Any, *, is_batch: bool) -> list[Any]:
            return [RewardResult(reward=1.0, parts={"a": 1.0}) for _ in items]

    groups = score_completions(Scorer(), [prompt(0)], [found, sibling])  # type: ignore[arg-type]
    save_groups(tmp_path / "a", [StoredRollouts(0, prompt(0), groups[0])])
    (stored,) = load_groups(tmp_path / "a", prompt)
    loaded = stored.content
    assert isinstance(loaded, RolloutGroup) and same(loaded, groups[0])
    back = loaded.rollouts[0].completion
    assert back.policy_versions[1].policy_version == 4 and type(back.policy_versions[1]) is VersionSpan
    assert back.loss_mask is not None and same(back.loss_mask, found.loss_mask) and not back.loss_mask[3]
    assert back.routed_experts is not None and same(back.routed_experts, found.routed_experts)


def test_errors_of_the_function_name_the_prompt_and_the_line(run: Any) -> None:
    async def fails(prompt: Prompt, turns: Turns) -> Completion:
        raise KeyError("tool")

    async def nothing(prompt: Prompt, turns: Turns) -> Any:
        await turns.sample()

    async def never_sampled(prompt: Prompt, turns: Turns) -> Completion:
        turns.append([5])
        return turns.finish()

    async def infinite(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample()
        return turns.finish(float("nan"))

    for function, words in (
        (fails, r"fails failed on prompt row:0: KeyError: 'tool' \(.*test_turns.py, line \d+\)"),
        (nothing, r"nothing returned None; expected the result of turns.finish\(\)"),
        (never_sampled, "1 tokens, none of them sampled"),
        (infinite, "the reward must be a finite number, got nan"),
    ):
        with pytest.raises(GenerateError, match=words):
            run(function)


def test_a_function_is_loaded_by_name_and_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("async def good(prompt, turns): ...\nasync def one(prompt): ...\ndef plain(p, t): ...\nx = 1\n")
    assert load_generate(f"{file}:good").__name__ == "good"
    for name, words in (
        (f"{file}:plain", "not 'async def'"),
        (f"{file}:one", r"has the parameters \(prompt\); expected \(prompt, turns\)"),
        (f"{file}:x", "rollout.generate = .* is not callable"),
        (f"{tmp_path}/absent.py:f", "does not exist"),
        ("math", "expected 'module:function'"),
    ):
        with pytest.raises(GenerateError, match=words):
            load_generate(name)


def test_settings_that_do_not_fit_are_refused() -> None:
    servers = {"engine": "sglang"}
    for rollout, train, words in (
        ({"order": "completed"}, {"max_staleness": 2}, "order = 'completed' needs inference servers"),
        (servers | {"order": "completed"}, {"max_staleness": 1}, "Set max_staleness to at least 2"),
        (servers | {"abort_slowest": True}, {}, "no effect with oversample = 1"),
        (servers | {"partial_rollouts": 1}, {}, "no effect without abort_slowest"),
        (
            servers | {"abort_slowest": True, "oversample": 2, "order": "completed"},
            {"max_staleness": 2},
            "never waits for a slow one",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            config(rollout=rollout, train=train)
    config(rollout=servers | {"abort_slowest": True, "oversample": 1.5, "partial_rollouts": 2})


def calculator() -> Any:
    spec = importlib.util.spec_from_file_location("calculator", ROOT / "examples/calculator/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator_computes_arithmetic_and_nothing_else() -> None:
    answer = calculator().answer
    for expression, value in {
        "12*(3+4)": "84",
        " 7 / 2 ": "3.5",
        "-3 // 2": "-2",
        "1/0": "error",
        "9**9**9": "error",
        "10**400": "error",
        "999999999999*9": "error",
        "__import__('os').system('true')": "error",
        "(lambda: 1)()": "error",
        "'a'*9": "error",
        "True": "error",
        "1 +": "error",
        "(" * 5000 + "1" + ")" * 5000: "error",
    }.items():
        assert answer(expression) == value, expression


def test_the_calculator_evaluates_the_call_at_the_end_of_a_turn() -> None:
    """The model is played: it writes a text, and stops where a call ends."""
    script = iter(["a>b<calc>2*21</calc>", "so 42\x02"])

    class Letters(FakeTokenizer):
        def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
            return "".join(map(chr, tokens)).replace("\x02", "")

    class Played:
        tokenizer = Letters()

        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.left = self.given = ""

        @property
        def token_ids(self) -> tuple[int, ...]:
            return tuple(self.tokens)

        async def sample(self, stop_token_ids: Any = ()) -> Any:
            text = self.left or next(script)
            ends = [i for i, letter in enumerate(text) if ord(letter) in stop_token_ids]
            cut = ends[0] + 1 if ends else len(text)
            piece, self.left = text[:cut], text[cut:]
            self.tokens += map(ord, piece)
            return SimpleNamespace(token_ids=tuple(map(ord, piece)), finish_reason="stop")

        def append(self, text: str) -> None:
            self.given += text
            self.tokens += map(ord, text)

        def finish(self) -> str:
            return Letters().decode(self.tokens, True)

    played = Played()
    assert asyncio.run(calculator().generate(None, played)) == "a>b<calc>2*21</calc> = 42\nso 42"
    assert played.given == " = 42\n"
