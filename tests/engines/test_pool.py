"""Several real servers as one engine: one dies, all get new weights in mid-rollout, a tool answers."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.sglang import SGLangServer
from tests.engines.servers import Engine, start_sglang, stop_engine, wait_ready
from tests.engines.tiny import SPECIAL, Reference, byte_tokenizer, difference

TOKENIZER = byte_tokenizer(SPECIAL)
PARAMS = SamplingParams(max_new_tokens=200, topk_logprobs=3, routed_experts=True)


class Watched(SGLangServer):
    """A client that counts the answers that came whole."""

    answered: Counter[str]
    asked: int

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked += 1
        answer = await super().generate(request)
        self.answered[request.request_id.split("~")[0]] += 1
        return answer


@pytest.fixture(scope="module")
def two(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two servers of the newest version; the last test kills one of them."""
    logs = tmp_path_factory.mktemp("pool")
    started = [start_sglang(old_model.folder, logs / f"log{i}", "--enable-return-routed-experts") for i in range(2)]
    try:
        yield [wait_ready(engine) for engine in started]
    finally:
        for engine in started:
            stop_engine(engine)


def engine_over(
    two: list[Engine], model: Reference, version: int, function: Any = None, alive: float = 30, max_in_flight: int = 32
) -> tuple[Any, ServerEngine]:
    clients = []
    limits = Deadlines(connect=2, alive=alive, control=60, update=120, generate=120)
    for engine in two:
        client = Watched(engine.url, deadlines=limits)
        client.answered, client.asked = Counter(), 0
        clients.append(client)
    over_both = ServerEngine(
        clients,
        TOKENIZER,
        AutoConfig.from_pretrained(model.folder),
        max_in_flight=max_in_flight,
        health_seconds=1,
        function=function,
    )
    update(over_both, clients, model, version)
    return clients, over_both


def update(engine: ServerEngine, clients: Any, model: Reference, version: int) -> None:
    """A weight sync as the trainer does it: what runs is stopped first, so that routes stay those that sampled."""

    async def run() -> None:
        for client in clients:
            await client.abort()
            await client.pause()
        for client in clients:
            await client.update_from_disk(str(model.folder), version)
            await client.resume()
        engine.pool.use_version(version, [client.url for client in clients])

    engine.run(run())


def prompts(count: int, siblings: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i // siblings}", text="", token_ids=tuple(range(10 + i // siblings, 40)), label="")
        for i in range(count)
    ]


def first_complete(
    engine: ServerEngine, asked: Sequence[Prompt], keys: Sequence[int], enough: int, keep: Sequence[int]
) -> list[list[Completion] | None]:
    """Groups of three, until ``enough`` are complete."""
    groups = [GroupRequest(key, prompt, 3) for key, prompt in zip(keys, asked, strict=True)]
    return [future.result(120) for future in engine.submit(groups, PARAMS, enough, keep)]


def check(prompt: Prompt, completion: Completion, models: dict[int, Reference]) -> None:
    """Every span equals transformers with the weights of its version: log-probabilities, Top-K, routes."""
    assert completion.logprobs is not None and completion.topk_token_ids is not None
    assert completion.topk_logprobs is not None and completion.routed_experts is not None
    tokens = completion.token_ids.tolist()
    length, first = len(tokens), len(prompt.token_ids)
    assert len(completion.logprobs) == length and completion.topk_token_ids.shape == (length, 4)
    assert completion.routed_experts.shape[0] == first + length - 1
    read = 0
    for version, start, end, _server in completion.policy_versions:
        model = models[version]
        expected = model.distributions(prompt.token_ids, tokens, 1.0)[start:end]
        sampled = expected.gather(1, completion.token_ids[start:end, None].long()).squeeze(1)
        assert difference(completion.logprobs[start:end], sampled) < 1e-5
        top = expected.topk(3).values
        assert difference(completion.topk_logprobs[start:end, :3], top) < 1e-5
        # A row belongs to the token that was read: those of this span end before its last token.
        routes = completion.routed_experts[read : first + end - 1]
        model.check_experts(routes, [*prompt.token_ids, *tokens], read)
        read = first + end - 1


def test_responses_of_two_servers_are_those_of_the_model_and_siblings_share_a_server(
    two: list[Engine], old_model: Reference
) -> None:
    clients, engine = engine_over(two, old_model, 3)
    try:
        asked = prompts(16, siblings=4)
        sampled = engine.generate(asked, PARAMS)
        for prompt, completion in zip(asked, sampled, strict=True):
            check(prompt, completion, {3: old_model})
        assert [client.asked for client in clients] == [8, 8]
        assert len({tuple(completion.token_ids.tolist()) for completion in sampled[:4]}) == 4
    finally:
        engine.close()


def test_responses_interrupted_by_new_weights_continue_and_each_span_has_its_version(
    two: list[Engine], old_model: Reference, new_model: Reference
) -> None:
    clients, engine = engine_over(two, old_model, 0)
    try:
        # How long a response takes depends on the machine and on what else it does.
        for version, seconds in enumerate((0.4, 0.1, 0.8, 0.2, 1.6, 0.05)):
            before, after = (old_model, new_model) if version % 2 == 0 else (new_model, old_model)
            asked, sampled = prompts(12, siblings=3), list[Completion]()
            thread = threading.Thread(target=sample_into, args=(sampled, engine, asked))
            thread.start()
            time.sleep(seconds)
            update(engine, clients, after, version + 1)
            thread.join(120)
            assert len(sampled) == len(asked)
            for prompt, completion in zip(asked, sampled, strict=True):
                check(prompt, completion, {version: before, version + 1: after})
            if sum(len(completion.policy_versions) == 2 for completion in sampled) >= 3:
                return
        pytest.fail("no update came while several responses were under way")
    finally:
        engine.close()


def is_asked(client: Any) -> None:
    """Wait until this server has requests: 200 tokens each, on any machine longer than it takes to go on here."""
    end = time.monotonic() + 60
    while not client.asked:
        assert time.monotonic() < end, "the server was never asked"
        time.sleep(0.02)


def sample_into(sampled: list[Completion], engine: ServerEngine, asked: list[Prompt]) -> None:
    sampled.extend(engine.generate(asked, PARAMS))


def test_the_slowest_responses_are_stopped_and_continued_with_the_next_weights(
    two: list[Engine], old_model: Reference, new_model: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the routes of each prompt asked for once for its three responses."""
    monkeypatch.setattr("megatron_dppo.engines.server_engine.MIN_SHARED_PROMPT_TOKENS", 0)
    clients, engine = engine_over(two, old_model, 0, max_in_flight=16)
    try:
        # More than are in flight at a time: those of one batch may all end together.
        asked = prompts(10, siblings=1)
        first = first_complete(engine, asked, range(10), enough=2, keep=range(10))
        left = [i for i, group in enumerate(first) if group is None]
        assert 2 <= 10 - len(left) < 10 and set(engine.unfinished()) == set(left)
        update(engine, clients, new_model, 1)
        completed = first_complete(engine, [asked[i] for i in left], left, enough=len(left), keep=())
        for prompt, group in zip(asked, first, strict=True):
            for completion in group or []:
                check(prompt, completion, {0: old_model})
        both = 0
        for i, group in zip(left, completed, strict=True):
            assert group is not None
            for completion in group:
                check(asked[i], completion, {0: old_model, 1: new_model})
                both += len(completion.policy_versions) == 2
        assert both
    finally:
        engine.close()


def calculator() -> Any:
    file = Path(__file__).parents[2] / "examples/calculator/generate.py"
    spec = importlib.util.spec_from_file_location("calculator", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tool_tokens_are_masked_and_model_tokens_are_exact(two: list[Engine], old_model: Reference) -> None:
    """Random weights never write a call, so each turn that stops is taken for one."""
    module = calculator()
    module._call = lambda turns, start: "6*7"
    module._last_token = lambda tokenizer, text: 60
    _, engine = engine_over(two, old_model, 5, module.generate)
    try:
        asked = prompts(16, siblings=2)
        sampled = engine.generate(asked, PARAMS)
        given = tuple(TOKENIZER.encode(" = 42\n", add_special_tokens=False))
        turns = 0
        for prompt, completion in zip(asked, sampled, strict=True):
            tokens = completion.token_ids.tolist()
            logprobs = completion.logprobs
            is_model_token = completion.loss_mask
            assert len(tokens) <= 200 and logprobs is not None
            is_model_token = torch.ones(len(tokens), dtype=torch.bool) if is_model_token is None else is_model_token
            expected = old_model.logprobs(prompt.token_ids, tokens, 1.0)
            assert (
                difference(logprobs[is_model_token], expected[is_model_token]) < 1e-5
                and not logprobs[~is_model_token].any()
            )
            covered = [i for _, start, end, _server in completion.policy_versions for i in range(start, end)]
            assert covered == is_model_token.nonzero().squeeze(1).tolist()
            assert completion.topk_token_ids is not None and completion.topk_token_ids[~is_model_token].eq(-1).all()
            tool = completion.token_ids[~is_model_token].tolist()
            assert tuple(tool) == (given * (len(tool) // len(given) + 1))[: len(tool)]
            turns += len(tool) // len(given)
            routes = completion.routed_experts
            assert routes is not None and routes.shape[0] == len(prompt.token_ids) + len(tokens) - 1
            known = len(prompt.token_ids) + covered[-1]
            old_model.check_experts(routes[:known], [*prompt.token_ids, *tokens])
        assert turns >= 3, "the case needs answers of the tool"
    finally:
        engine.close()


def test_a_hanging_server_is_evicted_and_used_after_it_recovers_with_the_current_weights(
    two: list[Engine], old_model: Reference
) -> None:
    clients, engine = engine_over(two, old_model, 0, alive=3)
    try:
        asked, sampled = prompts(12, siblings=2), list[Completion]()
        thread = threading.Thread(target=sample_into, args=(sampled, engine, asked))
        thread.start()
        is_asked(clients[1])
        os.killpg(two[1].process.pid, signal.SIGSTOP)
        try:
            thread.join(120)
        finally:
            os.killpg(two[1].process.pid, signal.SIGCONT)
        assert len(sampled) == len(asked)
        for prompt, completion in zip(asked, sampled, strict=True):
            check(prompt, completion, {0: old_model})
        assert engine.take_counts().evicted_servers == 1
        before = clients[1].asked
        assert len(engine.generate(asked[:4], PARAMS)) == 4
        assert clients[1].asked == before, "nobody asked yet whether it is back"
        update(engine, clients, old_model, 1)
        assert len(engine.generate(asked, PARAMS)) == 12
        assert clients[1].asked > before
    finally:
        engine.close()


def test_a_server_killed_during_a_rollout_costs_only_time(two: list[Engine], old_model: Reference) -> None:
    clients, engine = engine_over(two, old_model, 0)
    try:
        asked, sampled = prompts(12, siblings=2), list[Completion]()
        thread = threading.Thread(target=sample_into, args=(sampled, engine, asked))
        thread.start()
        is_asked(clients[1])
        os.killpg(two[1].process.pid, signal.SIGKILL)
        thread.join(180)
        assert len(sampled) == len(asked)
        for prompt, completion in zip(asked, sampled, strict=True):
            check(prompt, completion, {0: old_model})
        answered = clients[0].answered + clients[1].answered
        assert len(answered) == 12 and set(answered.values()) == {1}, "each exactly once"
        counts = engine.take_counts()
        assert counts.evicted_servers == 1 and counts.retries >= 1
        assert len(engine.generate(asked[:4], PARAMS)) == 4
    finally:
        engine.close()
