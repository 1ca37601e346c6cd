"""Responses from servers as the trainer gets them: whole, in order, each token with the weights that sampled it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from columns import same
from fake_servers import END, VOCAB, FakeServer, logprob, routes
from megatron_dppo.engines.responder import LoopThread, PromptRoutes
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, Prompt, SamplingParams

CONFIG = SimpleNamespace(vocab_size=VOCAB, eos_token_id=[END, 4])


class FakeTokenizer:
    eos_token_id = END

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return ",".join(map(str, tokens))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def prompt(i: int) -> Prompt:
    return Prompt(prompt_id=f"row:{i}", text="", token_ids=(100 + i, 7, 8), label="")


@pytest.fixture
def servers() -> list[FakeServer]:
    return [FakeServer(f"http://s:{i}", token_seconds=0.003) for i in range(2)]


@pytest.fixture
def engine(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerEngine]:
    import megatron_dppo.engines.server_engine as module
    from fake_servers import SHAPE

    monkeypatch.setattr(module, "routing_shape", lambda config: SHAPE)
    found = ServerEngine(servers, FakeTokenizer(), CONFIG, max_in_flight=32, health_seconds=0.05)  # type: ignore
    publish(found, servers, 1)
    yield found
    found.close()


def publish(engine: ServerEngine, servers: list[FakeServer], version: int) -> None:
    for server in servers:
        server.version = version
    engine.use_version(version, [server.url for server in servers])


def first_complete(
    engine: ServerEngine,
    wanted: Sequence[int],
    keys: Sequence[int],
    siblings: int,
    how: SamplingParams,
    enough: int,
    keep: Any,
) -> list[list[Completion] | None]:
    """The groups of some prompts, until ``enough`` are complete."""
    groups = [GroupRequest(key, prompt(i), siblings) for i, key in zip(wanted, keys, strict=True)]
    return [future.result(20) for future in engine.submit(groups, how, enough, keep)]


def params(tokens: int = 6, **settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=11, **settings)


def check(completion: Completion, first: int, versions: list[int]) -> None:
    """Every part of a completion by token, from the rules of the fake servers."""
    tokens = completion.token_ids.tolist()
    assert len(versions) == len(tokens)
    assert completion.logprobs is not None and completion.logprobs.tolist() == [
        logprob(first + i, token, version) for i, (token, version) in enumerate(zip(tokens, versions, strict=True))
    ]
    assert [span.policy_version for span in completion.policy_versions for _ in range(span.start, span.end)] == versions
    assert completion.policy_version == max(versions)
    assert completion.loss_mask is None and completion.text == ",".join(map(str, tokens))


def test_completions_are_in_the_order_of_the_prompts_with_all_columns(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    for server in servers:
        server.sample = lambda request, position: END if position == 6 else 5
    prompts = [prompt(i // 4) for i in range(12)]
    found = engine.generate(prompts, params(topk_logprobs=2, routed_experts=True))
    assert len(found) == 12
    for completion in found:
        check(completion, 3, [1] * 4)
        assert completion.finish_reason == "stop" and completion.token_ids.tolist() == [5, 5, 5, END]
        assert completion.topk_token_ids is not None and completion.topk_token_ids.shape == (4, 3)
        assert torch.equal(completion.routed_experts, routes(0, 6, 1))  # type: ignore[arg-type]
    requests = [request for server in servers for request in server.requests]
    assert len({request.params.seed for request in requests}) == 12, "siblings differ"
    assert len({request.request_id for request in requests}) == 12
    assert {request.stop_token_ids for request in requests} == {(2, 4)}
    assert engine.generate([prompt(0)], params(3))[0].finish_reason == "length"
    assert engine.policy_version == 1


def test_a_response_that_was_aborted_continues_under_the_new_weights(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    found: list[Completion] = []
    wanted = params(40, topk_logprobs=1, routed_experts=True)
    thread = threading.Thread(target=lambda: found.extend(engine.generate([prompt(0), prompt(1)], wanted)))
    thread.start()
    time.sleep(0.05)

    async def update() -> None:
        await asyncio.gather(*(server.abort() for server in servers))
        for server in servers:
            server.version = 2
        engine.pool.use_version(2, [server.url for server in servers])

    engine.run(update())
    thread.join(10)
    for completion in found:
        edge = completion.policy_versions[0].end
        assert 0 < edge < 40
        assert [span[:3] for span in completion.policy_versions] == [(1, 0, edge), (2, edge, 40)]
        check(completion, 3, [1] * edge + [2] * (40 - edge))
        assert completion.topk_token_ids is not None and completion.topk_token_ids.shape == (40, 2)
        expected = torch.cat([routes(0, 3 + edge - 1, 1), routes(3 + edge - 1, 42, 2)])
        assert torch.equal(completion.routed_experts, expected)  # type: ignore[arg-type]
    last = [server.requests[-1] for server in servers]
    assert all(request.params.max_new_tokens < 40 for request in last), "what is left of it"


def test_a_request_that_is_always_stopped_at_once_is_an_error(
    engine: ServerEngine, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dppo.engines.responder.MAX_EMPTY_RESPONSES", 2)
    stopping = True

    async def always() -> None:
        while stopping:
            await asyncio.gather(*(server.abort() for server in servers))
            await asyncio.sleep(0.001)

    thread = threading.Thread(target=lambda: engine.run(always()))
    thread.start()
    with pytest.raises(ServerError, match="aborted 3 times"):
        engine.generate([prompt(0)], params())
    stopping = False
    thread.join(5)


def slow_groups(servers: list[FakeServer], slow: set[int], end: int = 9) -> None:
    """The responses of some prompts never end by themselves; prompts are told by their first token."""
    for server in servers:
        server.sample = lambda request, position: (
            END if position == end and request.token_ids[0] - 100 not in slow else 5
        )


def test_the_slowest_groups_are_stopped_and_continued_later(engine: ServerEngine, servers: list[FakeServer]) -> None:
    slow_groups(servers, {1})
    first = first_complete(engine, range(3), [10, 11, 12], 2, params(60), enough=2, keep={10, 11, 12})
    assert first[1] is None and all(len(c.token_ids) == 7 for i in (0, 2) for c in first[i] or [])
    assert all(server.running == 0 for server in servers)
    publish(engine, servers, 5)
    slow_groups(servers, set(), end=40)
    (again,) = first_complete(engine, [1], [11], 2, params(60), enough=1, keep=())
    assert again is not None
    for completion in again:
        assert completion.finish_reason == "stop" and len(completion.token_ids) == 38
        edge = completion.policy_versions[0].end
        assert 0 < edge < 38
        assert [span[:3] for span in completion.policy_versions] == [(1, 0, edge), (5, edge, 38)]
        check(completion, 3, [1] * edge + [5] * (38 - edge))
    requests = [r for server in servers for r in server.requests]
    assert len({r.request_id for r in requests}) == len(requests)
    assert not engine.unfinished()


def test_a_group_that_is_not_held_starts_anew(engine: ServerEngine, servers: list[FakeServer]) -> None:
    slow_groups(servers, {1})
    first = first_complete(engine, [0, 1], [0, 1], 2, params(60), enough=1, keep=())
    assert first[1] is None
    publish(engine, servers, 5)
    slow_groups(servers, set())
    (again,) = first_complete(engine, [1], [1], 2, params(60), enough=1, keep=())
    assert again is not None and {span[:3] for c in again for span in c.policy_versions} == {(5, 0, 7)}


def test_requests_that_were_never_sent_do_not_start_when_others_are_stopped(servers: list[FakeServer]) -> None:
    dense = SimpleNamespace(vocab_size=VOCAB, eos_token_id=END)
    import megatron_dppo.engines.server_engine as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "routing_shape", lambda config: None)
        engine = ServerEngine(servers, FakeTokenizer(), dense, max_in_flight=2, health_seconds=1)  # type: ignore
    publish(engine, servers, 1)
    slow_groups(servers, {1, 2, 3})
    groups = first_complete(engine, range(4), [0, 1, 2, 3], 1, params(500), enough=1, keep={1, 2, 3})
    assert [group is None for group in groups] == [False, True, True, True]
    asked = {request.token_ids[0] - 100 for server in servers for request in server.requests}
    assert 3 not in asked and {0, 1} <= asked
    assert set(engine.unfinished()) == {1, 2, 3}
    with pytest.raises(ValueError, match="no experts"):
        engine.generate([prompt(0)], params(routed_experts=True))
    engine.close()


def test_router_weights_are_not_requested_from_servers(engine: ServerEngine) -> None:
    with pytest.raises(ValueError, match="router_weights"):
        engine.generate([prompt(0)], params(routed_experts=True, router_weights=True))


def test_a_snapshot_of_groups_in_flight_continues_here_and_in_another_engine(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    slow_groups(servers, set(), end=60)
    wanted = params(80, topk_logprobs=2, routed_experts=True)
    futures = engine.submit([GroupRequest(4, prompt(4), 2)], wanted, 1)
    time.sleep(0.05)
    found = engine.unfinished()
    assert found.keys() == {4} and all(server.running == 0 or server.requests for server in servers)
    had = [state.token_ids for state in found[4]]
    assert all(0 < len(tokens) < 58 for tokens in had)
    (here,) = [future.result(20) for future in futures]
    publish(engine, servers, 7)
    engine.restore(found)
    (there,) = first_complete(engine, [4], [4], 2, wanted, enough=1, keep=())
    for completion, other, tokens in zip(here or [], there or [], had, strict=True):
        edge = len(tokens)
        check(completion, 3, [1] * 58)
        check(other, 3, [1] * edge + [7] * (58 - edge))
        expected = torch.cat([routes(0, 3 + edge - 1, 1), routes(3 + edge - 1, 60, 7)])
        assert torch.equal(other.routed_experts, expected)  # type: ignore[arg-type]


def test_a_pause_aborts_requests_and_sends_none_until_the_weights_are_new(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    slow_groups(servers, set(), end=60)
    (future,) = engine.submit([GroupRequest(0, prompt(0), 4)], params(80), 1)
    time.sleep(0.05)
    engine.pause()
    assert all(server.running == 0 for server in servers)
    (later,) = engine.submit([GroupRequest(1, prompt(1), 1)], params(80), 1)
    time.sleep(0.05)
    assert all(server.running == 0 for server in servers) and not future.done()
    publish(engine, servers, 9)
    for completion in future.result(20) or []:
        assert [span.policy_version for span in completion.policy_versions] == [1, 9]
    check((later.result(20) or [])[0], 3, [9] * 58)


def test_a_function_continues_by_replay_after_it_was_stopped(servers: list[FakeServer]) -> None:
    """Turns of four tokens with two of a tool between them; the second call gives the function what it had."""
    begun: list[int] = []

    async def turns_of_four(prompt: Prompt, turns: Turns) -> Completion:
        begun.append(prompt.token_ids[0])
        for i in range(4):
            turn = await turns.sample(max_new_tokens=4)
            assert len(turn.token_ids) == 4 and turns.append([50 + i, 51]) == 2
        return turns.finish()

    dense = SimpleNamespace(vocab_size=VOCAB, eos_token_id=END)
    import megatron_dppo.engines.server_engine as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "routing_shape", lambda config: None)
        engine = ServerEngine(
            servers,
            FakeTokenizer(),
            dense,  # type: ignore[arg-type]
            max_in_flight=8,
            health_seconds=1,
            function=turns_of_four,
        )
    publish(engine, servers, 1)
    engine.submit([GroupRequest(0, prompt(0), 1)], params(90), 0, keep={0})[0].result(20)
    futures = engine.submit([GroupRequest(1, prompt(1), 1), GroupRequest(2, prompt(2), 1)], params(90), 2, keep={1, 2})
    time.sleep(0.03)
    half = engine.unfinished()
    assert any(0 < len(state.token_ids) < 24 for key in (1, 2) for state in half[key])
    whole = [future.result(20) for future in futures]
    publish(engine, servers, 3)
    engine.restore(half)
    again = first_complete(engine, [1, 2], [1, 2], 1, params(90), enough=2, keep=())
    for key, before, after in zip((1, 2), whole, again, strict=True):
        assert before is not None and after is not None
        assert same(before[0].token_ids, after[0].token_ids) and before[0].loss_mask is not None
        assert same(before[0].loss_mask, after[0].loss_mask)
        had = len(half[key][0].token_ids)
        versions = [v for v, start, end, _ in after[0].policy_versions for _ in range(start, end)]
        sampled = [i for i in range(24) if i % 6 < 4]
        assert versions == [1 if i < had else 3 for i in sampled]
    assert begun.count(101) >= 2
    engine.close()


def test_when_one_request_fails_the_others_have_ended(engine: ServerEngine, servers: list[FakeServer]) -> None:
    async def refuse(request: Any, stop: Any) -> Any:
        await asyncio.sleep(0.01)
        if request.token_ids[0] == 101:
            raise ServerError("http://s", "too long", 400)
        await asyncio.sleep(60)

    for server in servers:
        server._sample = refuse  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="HTTP 400: too long"):
        engine.generate([prompt(i) for i in range(3)], params())
    time.sleep(0.02)
    assert all(server.running == 0 for server in servers)


def test_the_loop_thread_returns_results_and_errors_and_ends() -> None:
    thread = LoopThread("test")

    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def fail() -> None:
        raise KeyError("k")

    assert thread.run(double(4)) == 8
    with pytest.raises(KeyError):
        thread.run(fail())
    thread.close()
    thread.close()
    assert not [t for t in threading.enumerate() if t.name == "test"]


def test_a_response_that_is_stopped_at_its_end_token_is_complete(
    engine: ServerEngine, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is told to stop while it samples the end token says abort."""
    generate = FakeServer.generate

    async def stopped(self: FakeServer, request: Any) -> Any:
        return replace(await generate(self, request), finish_reason="abort")

    for server in servers:
        server.sample = lambda request, position: END if position == 6 else 9
    monkeypatch.setattr(FakeServer, "generate", stopped)
    (found,) = engine.generate([prompt(0)], params(20))
    assert found.token_ids.tolist() == [9, 9, 9, END] and found.finish_reason == "stop"
    assert sum(len(server.requests) for server in servers) == 1


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also short prompts have their routes asked for once."""
    monkeypatch.setattr("megatron_dppo.engines.server_engine.MIN_SHARED_PROMPT_TOKENS", 0)


ROUTED = params(60, topk_logprobs=1, routed_experts=True)


def asked_from(servers: list[FakeServer]) -> list[tuple[int, int, int]]:
    """(first prompt token, first wanted row, tokens) of each request for a new response."""
    requests = [r for server in servers for r in server.requests if len(r.token_ids) == 3]
    return sorted((r.token_ids[0], r.routing_start, r.params.max_new_tokens) for r in requests)


@pytest.mark.usefixtures("shared")
def test_the_routes_of_a_prompt_are_requested_once_for_all_siblings(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    slow_groups(servers, set(), end=40)
    futures = engine.submit([GroupRequest(0, prompt(0), 4), GroupRequest(1, prompt(1), 1)], ROUTED, 2)
    time.sleep(0.04)
    wanted = [(100, 0, 1), *[(100, 2, 60)] * 3, (100, 2, 60), (101, 0, 60)]
    assert asked_from(servers) == sorted(wanted), "the row of the last prompt token by each"
    engine.pause()
    publish(engine, servers, 6)
    for future in futures:
        for completion in future.result(20) or []:
            edge = completion.policy_versions[0].end
            expected = torch.cat([routes(0, 3 + edge - 1, 1), routes(3 + edge - 1, 40, 6)])
            assert 0 < edge < 37 and same(completion.routed_experts, expected)
    assert asked_from(servers) == sorted(wanted), "what is known is not asked for again"


@pytest.mark.usefixtures("shared")
def test_siblings_without_routes_of_their_weights_request_them_or_start_again(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    """Requests that wait for their turn while the weights change; of version 2 all is over before the routes come."""
    slow_groups(servers, set(), end=40)
    engine.pool._slots = asyncio.Semaphore(2)
    (future,) = engine.submit([GroupRequest(0, prompt(0), 5)], ROUTED, 1)
    for version in (2, 3, 4):
        time.sleep(0.06)
        engine.pause()
        publish(engine, servers, version)
    found = future.result(20) or []
    assert len(found) == 5
    for completion in found:
        start, rows = 0, []
        for version, _, end, _ in completion.policy_versions:
            rows.append(routes(start, 3 + end - 1, version))
            start = 3 + end - 1
        assert same(completion.routed_experts, torch.cat(rows)[:40])
    assert len({completion.policy_versions[0].policy_version for completion in found}) > 1
    assert sum(tokens == 1 for _, _, tokens in asked_from(servers)) <= 4, "once by each version"


@pytest.mark.usefixtures("shared")
def test_a_response_whose_prompt_was_read_by_old_weights_starts_again(
    engine: ServerEngine, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_groups(servers, set(), end=20)
    by, lost = PromptRoutes.get, list[int]()

    async def first_is_lost(self: PromptRoutes, version: int, *names: str) -> torch.Tensor | None:
        if len(lost) < 4:  # of two siblings, before they ask and with their answers
            lost.append(version)
            return None
        return await by(self, version, *names)

    monkeypatch.setattr(PromptRoutes, "get", first_is_lost)
    (future,) = engine.submit([GroupRequest(0, prompt(0), 2)], ROUTED, 1)
    for completion in future.result(20) or []:
        check(completion, 3, [1] * 18)
        assert same(completion.routed_experts, routes(0, 20, 1))
    assert len([start for _, start, tokens in asked_from(servers) if tokens > 1 and start == 2]) > 2, "again"


@pytest.mark.usefixtures("shared")
def test_a_group_that_is_stopped_before_its_routes_arrive_continues_later(
    engine: ServerEngine, servers: list[FakeServer]
) -> None:
    slow_groups(servers, {0}, end=20)
    groups = [GroupRequest(i, prompt(i), 2) for i in range(3)]
    engine.pool._slots = asyncio.Semaphore(1)
    found = [future.result(20) for future in engine.submit(groups, ROUTED, 1, keep=range(3))]
    left = [i for i, group in enumerate(found) if group is None]
    assert len(left) == 2
    publish(engine, servers, 2)
    for group in first_complete(engine, left, left, 2, ROUTED, enough=2, keep=()):
        for completion in group or []:
            spans = completion.policy_versions
            whole = [span.policy_version for span in spans for _ in range(span.start, span.end)]
            first = sum(version == 1 for version in whole)
            expected = routes(0, 3 + len(whole) - 1, 2)
            if first:
                expected[: 3 + first - 1] = routes(0, 3 + first - 1, 1)
            assert same(completion.routed_experts, expected)
