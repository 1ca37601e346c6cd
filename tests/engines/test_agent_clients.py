"""Programs of SDKs and frameworks play on real servers, by a model whose responses are known (``chain_model``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.types import Completion, SamplingParams
from megatron_dppo_agents.generate import AgentFunction
from tests.engines.calls import call, client
from tests.engines.chain_model import CONTEXT, ChainModel
from tests.engines.servers import TOOLS, Engine, SharedEngine, start_sglang, start_vllm
from tests.engines.tiny import Reference, difference
from tests.unit.scripted import TASK

pytestmark = pytest.mark.long
PROGRAMS = Path(__file__).parent / "agents" / "clients"
VERSION = 4
MAX_TOKENS = 6000


class Episode(NamedTuple):
    """A program, and its wanted episode. Every segment trains whole."""

    program: str
    script: str
    calls: int
    segments: int
    tokens: int
    """Sampled tokens, which are bytes, and an end token for each response."""
    last: str | None = "It is 3."
    """Last text that the program has got."""

    def __str__(self) -> str:
        return f"{self.program}-{self.script}".replace(" ", "-")


PLAIN = [
    *("openai_responses", "openai_responses stream", "openai_responses chained", "anthropic_messages"),
    *("anthropic_messages stream", "anthropic_messages bearer", "agents_sdk", "agents_sdk stream"),
    *("agents_sdk responses", "agents_sdk responses stream", "litellm_loop", "litellm_loop stream"),
    *("litellm_loop anthropic", "litellm_loop anthropic stream", "litellm_loop responses"),
    *("litellm_loop responses stream", "pydantic_ai_loop", "pydantic_ai_loop stream", "pydantic_ai_loop anthropic"),
    *("pydantic_ai_loop anthropic stream", "pydantic_ai_loop responses", "pydantic_ai_loop responses stream"),
    "verifiers_env",
]
EPISODES = [
    Episode("openai_chat", "plain", 3, 1, 90, "Yes, I am."),
    Episode("openai_chat stream", "plain", 3, 1, 90, "Yes, I am."),
    Episode("openai_chat", "xml", 3, 1, 130, "Yes, I am."),
    Episode("openai_chat stream", "xml", 3, 1, 130, "Yes, I am."),
    Episode("agents_sdk", "thinking", 2, 1, 155),
    Episode("agents_sdk stream", "thinking", 2, 1, 155),
    Episode("pydantic_ai_loop stream", "thinking", 2, 1, 155),
    Episode("litellm_loop", "thinking_long", 9, 1, 858, "It is 10."),
    Episode("pydantic_ai_loop", "thinking_long", 9, 1, 858, "It is 10."),
    Episode("agents_sdk subagent", "agents", 4, 2, 172),
    Episode("agents_sdk handoff", "agents", 2, 2, 79),
    Episode("two_tools", "two_tools", 2, 1, 149, "3 and 7."),
    Episode("compaction", "compaction", 7, 2, 672, None),
    Episode("parallel", "compaction", 5, 5, 510, None),
    Episode("turn_rewards", "compaction", 3, 1, 306, None),
    *(Episode(program, "plain", 2, 1, 79) for program in PLAIN),
]


class ChainServer(NamedTuple):
    """A server of the model, and the model in transformers."""

    engine: Engine
    model: ChainModel
    reference: Reference


def publish(engine: Engine, folder: Path) -> None:
    async def update(server: Any) -> None:
        await server.pause()
        await server.update_from_disk(str(folder), VERSION)
        await server.resume()

    call(engine, update)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChainModel:
    return ChainModel(tmp_path_factory.mktemp("chain") / "model", json.loads((PROGRAMS / "scripts.json").read_text()))


@pytest.fixture(scope="module")
def sglang(model: ChainModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainServer]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    with SharedEngine(lambda: start_sglang(model.folder, log, "--context-length", str(CONTEXT))) as shared:
        publish(shared.engine(), model.folder)
        yield ChainServer(shared.engine(), model, Reference(model.folder))


@pytest.fixture(scope="module")
def vllm(model: ChainModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainServer]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with SharedEngine(lambda: start_vllm(model.folder, log, "--max-model-len", str(CONTEXT))) as shared:
        publish(shared.engine(), model.folder)
        yield ChainServer(shared.engine(), model, Reference(model.folder))


def interpreter(environment: str) -> str:
    done = subprocess.run([TOOLS / "agents.sh", "install", environment], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return f"{done.stdout.strip()}/bin/python"


def play(
    served: ChainServer, script: str, program: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Completion, list[dict[str, Any]]]:
    """Return the episode of a program, and the facts that it noted."""
    name, *words = program.split()
    monkeypatch.setenv("AGENTS_CLIENTS_LOG", str(log))
    python = interpreter("verifiers" if name == "verifiers_env" else "clients")
    command = [python, str(PROGRAMS / f"{name}.py"), *words]
    config = AgentConfig(
        command=command,
        reward="call",
        timeout_seconds=900,
        pass_env=["AGENTS_CLIENTS_LOG"],
        # The template of all scripts has the calls of hermes.
        format="qwen3_xml" if script == "xml" else "auto",
    )
    server = client(served.engine)
    function = AgentFunction(config, {})
    engine = ServerEngine(
        [server],
        served.model.tokenizer(script),
        AutoConfig.from_pretrained(served.model.folder),
        max_in_flight=8,
        health_seconds=5,
        function=function,
    )
    try:
        engine.use_version(VERSION, [server.url])
        (completion,) = engine.generate([TASK], SamplingParams(max_new_tokens=MAX_TOKENS, seed=1))
    finally:
        engine.close()
        function.close()
    return completion, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def check_tokens(served: ChainServer, completion: Completion) -> list[int]:
    """Compare the log-probabilities with those of transformers, and return the sampled tokens."""
    sampled: list[int] = []
    for segment in completion.segments:
        assert segment.loss_mask is not None and segment.logprobs is not None
        tokens, mask = segment.token_ids.tolist(), segment.loss_mask
        expected = served.reference.logprobs(tokens[:1], tokens[1:], 1.0)[mask[1:]]
        assert difference(segment.logprobs[mask], expected) < 1e-4
        assert expected.isnan().sum() < len(expected) / 2
        # Sampled, and not the most probable of one token: each byte has two.
        assert -1.0 < float(torch.nanmean(expected)) < -0.4
        sampled += segment.token_ids[mask].tolist()
        sources = {(span.policy_version, span.server) for span in segment.policy_versions}
        assert sources == {(VERSION, served.engine.url)}
    return sampled


@pytest.mark.parametrize("episode", EPISODES, ids=str)
def test_programs_play_their_episodes_on_sglang(
    episode: Episode, sglang: ChainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion, facts = play(sglang, episode.script, episode.program, tmp_path / "facts", monkeypatch)
    assert not completion.failure, completion.failure
    counts = completion.counts
    sampled = check_tokens(sglang, completion)
    row = (counts["agent/calls"], counts["agent/segments"], len(sampled), completion.reward)
    print(episode, row, facts)
    rewards = 1.0 + 0.1 + 0.2 if episode.program == "turn_rewards" else 1.0
    assert row == (episode.calls, episode.segments, episode.tokens, pytest.approx(rewards))
    assert counts["agent/untrained_fraction"] == 0 and counts["agent/malformed_calls"] == 0
    assert episode.last is None or facts[-1]["last"] == episode.last


def test_results_of_two_tools_stand_in_the_order_of_their_calls(
    sglang: ChainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion, _ = play(sglang, "two_tools", "two_tools", tmp_path / "facts", monkeypatch)
    text = sglang.model.tokenizer("two_tools").decode(completion.token_ids)
    assert 0 < text.index("<tool_response>3") < text.index("<tool_response>7")


def test_a_forced_choice_among_tools_is_sampled(
    sglang: ChainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydantic-ai forces a call of a tool, or of the one by which it takes its result. The model draws either."""
    completion, facts = play(sglang, "structured", "pydantic_ai_loop structured", tmp_path / "facts", monkeypatch)
    assert not completion.failure and completion.counts["agent/segments"] == 1
    sampled = sglang.model.tokenizer("structured").decode(check_tokens(sglang, completion))
    assert completion.counts["agent/calls"] == sampled.count("<|im_end|>") and facts[-1]["last"] == "total=3"
    assert completion.counts["agent/untrained_fraction"] == 0


def test_fields_are_followed_or_refused_in_words(
    sglang: ChainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion, facts = play(sglang, "plain", "fields", tmp_path / "facts", monkeypatch)
    assert not completion.failure, completion.failure
    check_tokens(sglang, completion)
    answers = {fact.pop("field"): fact for fact in facts}
    refused = {name for name, fact in answers.items() if "error" in fact}
    assert refused == {"n", "logprobs", "response_format", "image"}, answers
    assert all(answers[name]["error"] == "BadRequestError" for name in refused)
    for name in ("tool_choice_required", "tool_choice_named"):
        assert answers[name]["message"]["tool_calls"][0]["function"]["name"] == "add", answers[name]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("words", ["openai", "anthropic"])
def test_stop_strings_end_responses_of_real_servers(
    kind: str, words: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: ChainServer = request.getfixturevalue(kind)
    completion, facts = play(served, "stop", f"stop_strings {words}", tmp_path / "facts", monkeypatch)
    assert not completion.failure, completion.failure
    assert facts == [{"first": "Thought: I look.\nAction: add", "last": "It is 3."}]
    sampled = served.model.tokenizer("stop").decode(check_tokens(served, completion))
    assert sampled == "Thought: I look.\nAction: add\nObservation:It is 3.<|im_end|>"
    assert completion.counts["agent/segments"] == 1 and completion.counts["agent/untrained/after_stop"] > 0
