"""Segments of an episode: what begins one, that each sampled token is trained once, and the gradient of an episode.

The agents do by raw HTTP what the clients of ``agents_clients`` do; their numbers of tokens are the wanted ones.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import torch
from aiohttp import web

from columns import same
from fake_servers import END, logprob
from megatron_dppo.config.loss import Aggregation, LossConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.training_samples import RowShape, group_segments, to_samples, with_episode_tokens
from megatron_dppo.errors import ConfigError
from megatron_dppo.losses import policy_loss
from megatron_dppo.policy import packed as packed_module
from megatron_dppo.policy.packed import Packer
from megatron_dppo.policy.update import add_token_weights, split_into_mini_batches
from megatron_dppo.report.console import format_step_line
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.run.step import make_samples
from megatron_dppo.types import (
    Completion,
    FinishReason,
    LossInputs,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TrainingSample,
)
from megatron_dppo_agents.agent_request import AgentRequest
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.episode_result import CallCounts
from megatron_dppo_agents.runner import AgentTask
from megatron_dppo_agents.running_calls import RunningCalls
from megatron_dppo_agents.segments import join_segments
from megatron_dppo_conversations.rules import ConversationError, order_tool_results
from test_agents import chat, post, user
from tests.unit.configs import config
from tests.unit.engines.test_server_engine import publish
from tests.unit.scripted import CALL, TASK, TOOLS, World

OTHER_TOOLS = [{"type": "function", "function": {"name": "ask_adder", "parameters": {"type": "object"}}}]
THOUGHT = "I think about the sum of one and two, step by step, and it is three, which I check again by counting."
SUMMARY = "I added one and two and got three; then I checked it twice."
ASK = '<tool_call>{"name": "ask_adder", "arguments": {"input": "what is 1+2"}}</tool_call>'
HAND_OVER = '<tool_call>{"name": "transfer_to_adder", "arguments": {}}</tool_call>'


async def compaction(task: AgentTask) -> None:
    """Summarizes its history and continues from the summary, as compaction.py."""
    messages: list[Any] = list(task.messages)

    async def ask(text: str | None = None) -> str:
        if text is not None:
            messages.append(user(text))
        messages.append(await chat(task, messages, max_tokens=400))
        return str(messages[-1]["content"])

    await ask()
    await ask("Go on.")
    await ask("Go on.")
    summary = await ask("Summarise what you have done.")
    messages[:] = [*task.messages, user(f"Summary so far: {summary}")]
    for text in (None, "Go on.", "Go on."):
        await ask(text)


async def subagent(task: AgentTask) -> None:
    """Calls another agent as a tool, as agents_sdk.py subagent."""
    system = {"role": "system", "content": "Delegate."}
    boss = [system, user("1+2"), await chat(task, [system, user("1+2")], tools=OTHER_TOOLS)]
    adder: list[Any] = [{"role": "system", "content": "Use the tool."}, user("what is 1+2")]
    adder.append(await chat(task, adder, tools=TOOLS))
    adder.append({"role": "tool", "tool_call_id": adder[-1]["tool_calls"][0]["id"], "content": "3"})
    said = await chat(task, adder, tools=TOOLS)
    boss.append({"role": "tool", "tool_call_id": boss[-1]["tool_calls"][0]["id"], "content": said["content"]})
    await chat(task, boss, tools=OTHER_TOOLS)


async def handoff(task: AgentTask) -> None:
    """Hands the conversation over to an agent with another system message, as agents_sdk.py handoff."""
    tools = [{"type": "function", "function": {"name": "transfer_to_adder", "parameters": {"type": "object"}}}]
    history: list[Any] = [user("1+2")]
    history.append(await chat(task, [{"role": "system", "content": "Hand over."}, *history], tools=tools))
    history.append({"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "adder"})
    await chat(task, [{"role": "system", "content": "Use the tool."}, *history], tools=TOOLS)


async def parallel(task: AgentTask) -> None:
    """Four workers at the same time and a summary, as parallel.py."""
    parts = await asyncio.gather(*(chat(task, [user(f"{task.prompt} (worker {n})")]) for n in range(4)))
    await chat(task, [user("Summarise: " + " ".join(part["content"] for part in parts))])


COMPACTION = {
    "Summarise what you have done.<|im_end|>\n<|im_start|>assistant\n": SUMMARY,
    "<|im_start|>assistant\n": THOUGHT,
}
AGENTS = {
    "</tool_response><|im_end|>\n<|im_start|>assistant\n": "It is 3.",
    "Delegate.<|im_end|>\n<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n": ASK,
    "Hand over.<|im_end|>\n<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n": HAND_OVER,
    "<|im_start|>assistant\n": CALL,
}


@pytest.mark.parametrize(
    ("agent", "script", "calls", "tokens", "last"),
    [
        (compaction, COMPACTION, 7, [366, 306], 1),
        (subagent, AGENTS, 4, [93, 79], 0),
        (handoff, AGENTS, 2, [70, 9], 1),
        (parallel, COMPACTION, 5, [102] * 5, 4),
    ],
)
def test_every_sampled_token_of_an_episode_is_trained_once(
    world: World,
    agent: Callable[[AgentTask], Awaitable[None]],
    script: dict[str, str],
    calls: int,
    tokens: list[int],
    last: int,
) -> None:
    world.script = script
    engine = world.engine(agent)
    how = SamplingParams(max_new_tokens=6000, seed=1, topk_logprobs=2, routed_experts=True)
    result = engine.generate([TASK], how)[0]
    segments = result.segments
    assert not result.failure and result.counts["agent/calls"] == calls
    assert [int(s.loss_mask.sum()) for s in segments] == tokens  # type: ignore[union-attr]
    assert result.counts["agent/segments"] == len(tokens) and result.counts["agent/untrained_fraction"] == 0
    assert len({request.params.seed for request in world.server.requests}) == calls
    # The text for reward functions is that of the segment with the last response.
    assert result.text == result.segment_texts[last] and len(result.segment_texts) == len(tokens)
    # Columns of each segment are its own: log-probabilities by position, versions, routes of all tokens but the last.
    for segment in segments:
        ids, mask = segment.token_ids.tolist(), segment.loss_mask.tolist()  # type: ignore[union-attr]
        expected = [logprob(i, t, 4) if on else 0.0 for i, (t, on) in enumerate(zip(ids, mask, strict=True))]
        assert segment.logprobs is not None and segment.logprobs.tolist() == expected
        assert segment.routed_experts is not None and len(segment.routed_experts) == len(ids) - 1
        assert segment.routed_experts[:, 0, 0].tolist() == [p % 4 for p in range(len(ids) - 1)]
        spans = [t for s in segment.policy_versions for t in range(s.start, s.end)]
        assert spans == [i for i, on in enumerate(mask) if on]
    # One sample a segment, with the advantage of the episode. Rewards stay per episode.
    (group,) = score_completions(Scorer(), [TASK], [result, result])  # type: ignore[arg-type]
    samples = to_samples([group], [[-0.5, 0.5]])
    assert [s.segment for s in samples] == 2 * list(range(len(tokens)))
    assert [s.num_loss_tokens for s in samples] == tokens * 2
    assert {float(a) for s in samples[: len(tokens)] for a in s.advantages[s.loss_mask]} == {-0.5}
    assert (
        Scorer.items[0].metadata["segments"] == list(result.segment_texts) and Scorer.items[0].completion == result.text
    )


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_agent_that_shortens_a_conversation_after_a_refusal_is_not_cut_off(world: World, goes_on: bool) -> None:
    world.script = COMPACTION
    statuses = []

    async def agent(task: AgentTask) -> float:
        messages = [user(task.prompt), await chat(task, [user(task.prompt)]), user("x" * 200)]
        statuses.append((await post(task, "/chat/completions", {"messages": messages}))[0])
        if goes_on:
            await chat(task, [user("Summary: three.")])
        return 1.0

    (result,) = world.engine(agent, reward="exit").generate([TASK], SamplingParams(max_new_tokens=300, seed=1))
    assert statuses == [400] and not result.failure and result.counts["agent/rejected_calls"] == 1
    assert result.finish_reason == (FinishReason.STOP if goes_on else FinishReason.LENGTH)


class Scorer:
    """Scorer that returns the index of each sample."""

    items: list[RewardItem] = []  # noqa: RUF012

    def score(self, items: Any, *, is_batch: bool) -> list[RewardResult]:
        Scorer.items = list(items)
        return [RewardResult(reward=float(index)) for index, _ in enumerate(items)]


def test_calls_of_an_episode_are_sampled_at_the_same_time_and_repeated_bodies_once(world: World) -> None:
    world.script = COMPACTION
    arrived = asyncio.Event()
    generate = world.server.generate

    async def wait_for_four(request: Any) -> Any:
        world.server.running += 1
        if world.server.running == 4:
            arrived.set()
        # Calls that are served one after the other would wait forever.
        await asyncio.wait_for(arrived.wait(), 20)
        world.server.running -= 1
        return await generate(request)

    world.server.generate = wait_for_four  # type: ignore[method-assign]
    result = world.play(parallel, 6000)
    assert result.counts["agent/calls"] == 5 and [len(world.trained(s)) for s in result.segments] == [1] * 5

    world.server.generate = generate  # type: ignore[method-assign]
    world.server.token_seconds = 0.005
    world.server.requests.clear()
    bodies: list[Any] = []

    async def twice(task: AgentTask) -> None:
        body = {"messages": [user("a")]}
        bodies.extend(await asyncio.gather(*(post(task, "/chat/completions", body) for _ in range(3))))
        bodies.append(await post(task, "/chat/completions", body | {"seed": 7}))

    result = world.play(twice, 6000)
    assert bodies[0] == bodies[1] == bodies[2] != bodies[3]
    assert len(world.server.requests) == 2 and len(result.segments) == 2
    assert result.counts["agent/repeated_calls"] == 2 and result.counts["agent/rejected_calls"] == 0


def test_a_response_that_nobody_read_is_given_to_the_same_body(world: World) -> None:
    world.script = COMPACTION
    world.server.token_seconds = 0.002
    bodies: list[Any] = []

    async def gives_up(task: AgentTask) -> None:
        body = {"messages": [user("a")]}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(task, "/chat/completions", body), 0.1)
        while not world.server.finished:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        bodies.append(await post(task, "/chat/completions", body))

    result = world.play(gives_up, 6000)
    assert bodies[0][1]["choices"][0]["message"]["content"] == THOUGHT
    assert len(world.server.requests) == 1 and result.counts["agent/repeated_calls"] == 1


def test_a_response_that_nobody_read_does_not_train(world: World) -> None:
    world.script = {"assistant\n": "a long answer of the policy"}

    generate = world.server.generate
    arrived = asyncio.Event()
    is_gone = asyncio.Event()

    async def wait_for_the_end(request: Any) -> Any:
        arrived.set()
        await is_gone.wait()
        return await generate(request)

    async def gives_up(task: AgentTask) -> None:
        first = await chat(task, [user("a")])
        world.server.generate = wait_for_the_end  # type: ignore[method-assign]
        for messages in ([user("a"), first, user("b")], [user("c")]):
            arrived.clear()
            is_gone.clear()
            call = asyncio.create_task(post(task, "/chat/completions", {"messages": messages}))
            await arrived.wait()
            call.cancel()
            await asyncio.wait([call])
            await asyncio.sleep(0.2)  # the endpoint's thread sees the closed connection
            is_gone.set()
            await asyncio.sleep(0.2)

    result = world.play(gives_up, 6000)
    assert [world.trained(each) for each in result.segments] == [["a long answer of the policy<|im_end|>"]]
    assert result.counts["agent/sequences"] == result.counts["agent/segments"] == 1
    assert result.counts["agent/untrained/interrupted"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_response_is_read_if_one_of_its_clients_read_it(gone: int) -> None:
    """Clients with a time limit send a call again while its first one is in progress."""

    async def ask_three_times() -> list[Any]:
        calls = RunningCalls(CallCounts())
        call = AgentRequest(model="m", is_chat=True)
        response = AgentResponse(call=call, message={}, token_ids=(), prompt_token_ids=(), finish_reason="stop")
        is_sampled = asyncio.Event()

        async def sample() -> AgentResponse:
            await is_sampled.wait()
            return response

        clients = [asyncio.create_task(calls.respond(sample, b"body")) for _ in range(3)]
        asyncio.get_running_loop().call_soon(is_sampled.set)
        assert [await each for each in clients] == [response] * 3
        for _ in range(gone):
            calls.keep_undelivered(b"body", response)
        undelivered = calls.undelivered
        if undelivered:
            assert await calls.respond(sample, b"body") is response and not calls.undelivered
        calls.close()
        return undelivered

    assert len(asyncio.run(ask_three_times())) == (gone == 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_whose_connection_breaks_while_it_is_written_does_not_train(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    world.script = {"assistant\n": "ok"}
    prepare = web.StreamResponse.prepare

    async def breaks(self: web.StreamResponse, request: Any) -> Any:
        if b"lost" in await request.read():
            request.transport.abort()
        return await prepare(self, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", breaks)

    async def loses_the_last_call(task: AgentTask) -> None:
        await chat(task, [user("a")])
        with pytest.raises(aiohttp.ClientError):
            await post(task, "/chat/completions", {"messages": [user("lost")], "stream": stream})

    result = world.play(loses_the_last_call, 6000)
    assert len(result.segments) == 1
    assert result.counts["agent/untrained/interrupted"] == pytest.approx(1 / 2)


REWRITTEN = {
    '{"a": 1.0, "b": 2}': 0,
    '{"b": 2, "a": 1e0}': 0,
    '{"a": 1, "b": 2.5}': 1,
    '{"a": "1", "b": 2}': 1,
    '{"a": true, "b": 2}': 1,
}
"""Arguments as a client sends them back, and the number of forks."""


@pytest.mark.parametrize(("arguments", "forks"), REWRITTEN.items())
def test_numbers_are_compared_by_value_and_a_rewritten_response_is_a_fork(
    world: World, arguments: str, forks: int
) -> None:
    world.script = {"assistant\n": CALL, "</tool_response><|im_end|>\n<|im_start|>assistant\n": "done"}

    async def agent(task: AgentTask) -> None:
        answer = await chat(task, [user("a")], tools=TOOLS)
        answer["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
        await chat(task, [user("a"), answer, result], tools=TOOLS)
        # Examples before another question are no rewritten response.
        example = [user("x"), {"role": "assistant", "content": "y"}]
        await chat(task, [*example, user("b")])
        await chat(task, [*example, user("c")])

    result = world.play(agent, 6000)
    assert len(result.segments) == 3 + forks and result.counts["agent/forks/history"] == forks


def test_a_call_whose_text_a_client_has_rewritten_is_a_fork(world: World) -> None:
    """Clients that read calls from the text write them again, as qwen-agent, also behind a first turn."""
    world.script = {"go on<|im_end|>\n<|im_start|>assistant\n": CALL, "assistant\n": "well", "Sum:": " 3.0 \n"}

    async def agent(task: AgentTask) -> None:
        first = await chat(task, [user("a")])
        messages = [user("a"), first, user("go on")]
        called = await chat(task, messages)
        rewritten = {**called, "content": called["content"].replace("1", "1.0")}
        await chat(task, [*messages, rewritten, user("3")])
        _, answer = await post(task, "/completions", {"prompt": "Sum:"})
        text = answer["choices"][0]["text"].strip().replace("3.0", "3")
        await post(task, "/completions", {"prompt": f"Sum: {text} and"})

    result = world.play(agent, 2000)
    assert len(result.segments) == 4 and result.counts["agent/forks/history"] == 2


def test_a_program_can_leave_segments_out_and_the_step_line_says_so(world: World) -> None:
    world.script = {"assistant\n": "four"}

    async def agent(task: AgentTask) -> None:
        first = await chat(task, [user("a")])
        _, judged = await post(task, "/chat/completions", {"messages": [user("judge")]})
        for body, words in (
            ({"id": "chatcmpl-unknown", "train": False}, "no response of this episode"),
            ({"id": judged["id"], "train": True}, "expected false"),
            ({"id": judged["id"]}, "expected {"),
        ):
            status, error = await post(task, "/segment", body)
            assert status == 400 and words in error["error"]["message"]
        assert (await post(task, "/segment", {"id": judged["id"], "train": False}))[0] == 200
        headers = {"X-Train": "false"}
        for value, status in (("false", 200), ("no", 400)):
            headers = {"X-Train": value}
            # The same history as the first: it is not continued, which would leave that out, too.
            body = {"messages": [user("a"), first, user("title")]}
            assert (await post(task, "/chat/completions", body, headers=headers))[0] == status

    result = world.play(agent, 600)
    assert world.trained(result) == ["four<|im_end|>"] and result.counts["agent/sequences"] == 3
    assert (
        result.counts["agent/untrained/left_out"] == pytest.approx(2 / 3) == result.counts["agent/untrained_fraction"]
    )
    line = format_step_line(1, 2, {f"rollout/{name}": value for name, value in result.counts.items()})
    assert line.endswith("agents untrained 67%: left_out 67%")

    async def nothing(task: AgentTask) -> None:
        await post(task, "/chat/completions", {"messages": [user("a")]}, headers={"X-Train": "false"})

    engine = world.engine(nothing)
    failed = engine.generate([TASK], SamplingParams(max_new_tokens=100))[0]
    assert "left all responses of the policy out of training" in failed.failure


def test_prompts_by_which_programs_test_their_model_are_left_out(world: World) -> None:
    world.script = {"assistant\n": "four", "greet": "five"}
    texts = ["say 'hello", "Write a title"]
    greeting = "Please say 'hello, world'"

    async def agent(task: AgentTask) -> None:
        await post(task, "/responses", {"input": greeting})
        await post(task, "/messages", {"max_tokens": 9, "system": "Write a title.", "messages": [user("1+2")]})
        await post(task, "/completions", {"prompt": f"{greeting} greet"})
        hello = await chat(task, [user(greeting)])
        await chat(task, [user(greeting), hello, user("Go on")])
        first = await chat(task, [user("1+2")])
        # The text comes later, and so the conversation trains.
        await chat(task, [user("1+2"), first, user("Write a title")])

    result = world.play(agent, 2000, untrained_prompts=texts)
    assert result.counts["agent/sequences"] == 5 and world.trained(result) == ["four<|im_end|>"] * 2
    assert result.counts["agent/untrained/left_out"] == pytest.approx(5 / 7, abs=0.02)
    assert world.play(agent, 2000).counts["agent/untrained/left_out"] == 0
    with pytest.raises(ValueError, match=r"untrained_prompts\.0"):
        world.engine(agent, untrained_prompts=[""])


def test_a_call_that_begins_one_segment_too_many_is_rejected(world: World) -> None:
    world.script = {"assistant\n": "four"}

    async def agent(task: AgentTask) -> None:
        first = await chat(task, [user("a")])
        await chat(task, [user("b")])
        status, body = await post(task, "/chat/completions", {"messages": [user("c")]})
        assert status == 400 and body["error"]["code"] == "max_segments"
        assert "agent.max_segments" in body["error"]["message"]
        await chat(task, [user("a"), first, user("b")])

    result = world.play(agent, 600, max_segments=2)
    assert len(result.segments) == 2 and result.finish_reason == "length"


def call(call_id: str, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}


def answer_of(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_results_of_tools_stand_in_the_order_of_the_calls() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call("x"), call("y"), call("z")]}
    for order in ("xyz", "zyx", "yzx", "yx", "z"):
        messages = [user("a"), said, *(answer_of(name, name) for name in order), user("b"), said, answer_of("x", "x")]
        ordered = order_tool_results(messages)
        assert [m["content"] for m in ordered[2 : 2 + len(order)]] == sorted(order)
        assert ordered[2 + len(order) :] == messages[2 + len(order) :]
    without_ids = [said, {"role": "tool", "content": "2"}, {"role": "tool", "content": "1"}]
    assert order_tool_results(without_ids) == [said, answer_of("x", "2"), answer_of("y", "1")]
    for messages, words in (
        ([said, answer_of("q", "")], "'q' is no call of the response before it"),
        ([answer_of("x", "")], "it has none"),
        ([said, answer_of("x", ""), answer_of("x", "")], "has a result already"),
        ([said, {"role": "assistant", "content": "", "tool_calls": [call("v")]}, answer_of("x", "")], "'x' is no call"),
        ([{**said, "tool_calls": [call("x"), call("x")]}], "one id twice"),
    ):
        with pytest.raises(ConversationError, match=words):
            order_tool_results(messages)


def test_rewards_of_responses_are_credited_as_in_the_example_by_hand(world: World) -> None:
    """Docs' example: the rewards 1 and 0.5 of two responses, and 1 of the episode; its sibling has 0.5."""
    world.script = {"assistant\n": "four"}

    async def agent(task: AgentTask) -> None:
        messages: list[Any] = [user("a")]
        for reward in (1.0, 0.5):
            _, body = await post(task, "/chat/completions", {"messages": messages})
            messages += [body["choices"][0]["message"], user("more")]
            for value in (9.0, reward):  # the later one counts
                status, _ = await post(task, "/reward", {"reward": value, "id": body["id"]})
                assert status == 200
        for wrong in ({"reward": 1, "id": "chatcmpl-0"}, {"reward": 1, "turn": 0}, {"reward": 1, "id": 3}, {"id": "a"}):
            status, error = await post(task, "/reward", wrong)
            assert status == 400 and error["error"]["message"]
        await post(task, "/reward", {"reward": 1})

    async def sibling(task: AgentTask) -> None:
        await chat(task, [user("a")])
        await post(task, "/reward", {"reward": 0.5})

    for advantage, expected in (
        # Without a scale: mean 1.5. Returns 2.5 and 1.5.
        ("mean", [[1.0, 0.0], [-1.0]]),
        ("none", [[2.5, 1.5], [0.5]]),
        ("leave_one_out", [[2.0, 0.0], [-2.0]]),
        # Deviation of 2.5 and 0.5, n - 1: sqrt(2).
        ("std", [[1 / (2**0.5 + 1e-4), 0.0], [-1 / (2**0.5 + 1e-4)]]),
    ):
        parts = [world.play(each, 600, reward="call", credit="turn") for each in (agent, sibling)]
        assert [part.reward for part in parts] == [2.5, 0.5]
        (group,) = score_completions(Scorer(), [TASK], parts)  # type: ignore[arg-type]
        samples = make_samples([group], TrainConfig(advantage=advantage), RewardConfig())
        values = [s.advantages[s.loss_mask].tolist() for s in samples]
        per_turn = [[row[0], row[-1]] if len(row) > 5 else [row[0]] for row in values]
        assert per_turn[0] == pytest.approx(expected[0], abs=1e-6) and per_turn[1] == pytest.approx(expected[1])
        assert values[0] == [values[0][0]] * 5 + [values[0][-1]] * 5

    whole = [world.play(each, 600, reward="call") for each in (agent, sibling)]
    (group,) = score_completions(Scorer(), [TASK], whole)  # type: ignore[arg-type]
    first, _ = make_samples([group], TrainConfig(advantage="mean"), RewardConfig())
    assert set(first.advantages[first.loss_mask].tolist()) == {1.0}
    with pytest.raises(ConfigError, match=r"agent\.credit"):
        config(agent={"command": ["a"], "credit": "turn"})
    with pytest.raises(ConfigError, match=r"agent\.credit"):
        config(agent={"command": ["a"], "credit": "turn", "reward": "call"}, reward={"kl_coef": 0.1})


def test_random_forks_train_what_was_sampled(world: World) -> None:
    def sample(request: Any, position: int) -> int:
        return END if (position * 7 + len(request.token_ids)) % 13 == 0 else 97 + position % 20

    world.server.sample = sample
    sampled: list[int] = []
    seed = 0

    async def agent(task: AgentTask) -> None:
        rng = random.Random(seed)
        histories: list[list[Any]] = [[]]
        for _ in range(40):
            known = rng.choice(histories)
            messages = [*known, user(f"question {rng.randint(0, 3)}")]
            change = rng.random()
            if change < 0.2 and len(messages) > 2:
                messages = messages[2:]
            elif change < 0.3:
                messages[0] = user("edited")
            tools = rng.choice([None, None, TOOLS, OTHER_TOOLS])
            bodies = [
                {"messages": messages, "seed": n} | ({"tools": tools} if tools else {})
                for n in range(rng.choice([1, 1, 3]))
            ]
            for status, body in await asyncio.gather(*(post(task, "/chat/completions", each) for each in bodies)):
                assert status == 200, body
                sampled.append(body["usage"]["completion_tokens"])
                histories.append([*messages, body["choices"][0]["message"]])

    for seed in range(3):  # noqa: B007 the agent reads it
        sampled.clear()
        result = world.play(agent, 20000, max_calls=200)
        samples = to_samples(
            [RolloutGroup(prompt=TASK, rollouts=(Rollout(prompt=TASK, completion=result, reward=1.0),))], [[1.0]]
        )
        assert sum(s.num_loss_tokens for s in samples) == sum(sampled) > 300
        assert len(samples) == result.counts["agent/segments"] > 10 and result.counts["agent/untrained_fraction"] == 0
        forks = {name: count for name, count in result.counts.items() if name.startswith("agent/forks/")}
        assert forks["agent/forks/history"] and forks["agent/forks/tools"] and len(forks) == 4
        for sample_ in samples:
            spans = [t for s in sample_.sources for t in range(s.start, s.end)]
            assert spans == sample_.loss_mask.nonzero().flatten().tolist()


def test_an_episode_that_is_stopped_continues_with_all_of_its_segments(world: World, tmp_path: Path) -> None:
    ask = "<|im_end|>\n<|im_start|>assistant\n"
    # Long enough that a worker is not complete when it is stopped, however slow the machine is.
    long = THOUGHT * 6
    world.script = {f"quick{ask}": "ok", f"begin{ask}": THOUGHT, f"end{ask}": THOUGHT, ask: long}
    world.server.token_seconds = 0.001
    is_first = True

    async def agent(task: AgentTask) -> None:
        if task.prompt == "quick":
            while len(world.server.requests) < 4:  # until the workers of the other have begun
                await asyncio.sleep(0.005)
            await chat(task, [user("quick")])
            return
        await chat(task, [user("begin")])
        workers = [chat(task, [user(f"worker {n}")]) for n in range(3)]
        # In another order than in the first attempt: segments are result by their tokens.
        await asyncio.gather(*(workers if is_first else reversed(workers)))
        await chat(task, [user("end")])

    def prompt(text: str) -> Prompt:
        return Prompt(prompt_id=text, text=text, token_ids=(7,), label="", messages=(user(text),), is_task=True)

    delayed: list[str] = []
    abort = world.server.abort

    async def abort_one_later(name: str | None = None) -> None:
        # The last worker's request ends after the others: what ends the episode must wait for it.
        if name is not None and not delayed and len(world.server.aborted) >= 2:
            delayed.append(name)
            return
        await abort(name)

    world.server.abort = abort_one_later  # type: ignore[method-assign]
    engine = world.engine(agent)
    groups = [GroupRequest(0, prompt("slow"), 1), GroupRequest(1, prompt("quick"), 1)]
    how = SamplingParams(max_new_tokens=1000, seed=1)
    slow, quick = [future.result(60) for future in engine.submit(groups, how, 1, [0, 1])]
    assert slow is None and quick is not None and delayed
    stored = [StoredRollouts(0, prompt("slow"), engine.unfinished()[0])]
    save_groups(tmp_path / "rollouts", stored)
    (loaded,) = load_groups(tmp_path / "rollouts", lambda position: prompt("slow"))
    assert same(loaded.content, stored[0].content)
    (state,) = loaded.content  # type: ignore[misc]
    parts = [state, *state.branches]
    had = [part.token_ids[part.sampled] for part in parts]
    assert len(parts) == 4 and len(had[0]) == len(THOUGHT) + 1 and all(0 < len(each) < len(long) for each in had[1:])

    is_first = False
    world.server.token_seconds = 0
    world.server.requests.clear()
    other = world.engine(agent)
    publish(other, [world.server], 5)
    other.restore({0: loaded.content})  # type: ignore[dict-item]
    (group,) = [future.result(60) for future in other.submit(groups[:1], how, 1)]
    assert group is not None
    (result,) = group
    by_opening = {world.text(s).split("<|im_end|>")[0].split("\n")[1]: s for s in result.segments}
    assert sorted(by_opening) == ["begin", "end", "worker 0", "worker 1", "worker 2"] and len(result.segments) == 5
    for name, segment in by_opening.items():
        said = long if name.startswith("worker") else THOUGHT
        assert world.trained(segment) == [f"{said}<|im_end|>"], name
    for part in parts:
        name = world.tokenizer.decode(part.token_ids.tolist()).split("<|im_end|>")[0].split("\n")[1]
        segment = by_opening[name]
        assert same(segment.token_ids[: len(part.token_ids)], part.token_ids)
        versions = [span.policy_version for span in segment.policy_versions]
        assert versions == ([4] if name == "begin" else [4, 5])
    # Nothing that was sampled is sampled again: three rests and the last call.
    assert len(world.server.requests) == 4
    assert result.counts["agent/untrained_fraction"] == 0


# The gradient of an episode in two segments, by hand.

MU = -2.0
"""Log mu of all tokens."""


def completion(prompt: list[int], response: list[int], more: list[int] | None = None) -> Completion:
    """A sequence of a prompt and a response; ``more``: given tokens behind it, and one more sampled one."""
    more_ids = [] if more is None else [*more, 9]
    ids = [*prompt, *response, *more_ids]
    mask = [False] * len(prompt) + [True] * len(response) + [False] * len(more or []) + [True] * (more is not None)
    return Completion(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        logprobs=torch.where(torch.tensor(mask), MU, 0.0),
        finish_reason=FinishReason.STOP,
        policy_version=1,
        text="",
        loss_mask=torch.tensor(mask),
    )


EPISODE = [completion([1, 2], [3, 4, 5], [6]), completion([2], [7, 8])]
SINGLE = completion([4], [5, 6, 7])
UNKNOWN = replace(completion([1], [9, 3]), logprobs=torch.tensor([0.0, -math.inf, -math.inf]))
"""A sequence without a token in the loss: nothing is known of how its tokens were sampled."""
Trained = list[list[list[tuple[int, int]]]]
"""Tokens that are trained: (token before, token), of each segment of each episode."""
FULL: Trained = [[[(2, 3), (3, 4), (4, 5), (6, 9)], [(2, 7), (7, 8)]], [[(4, 5), (5, 6), (6, 7)]]]
EPISODES: dict[str, tuple[list[list[Completion]], Trained]] = {
    "all full": ([EPISODE, [SINGLE]], FULL),
    **{
        f"segment {index} empty": (
            [[*EPISODE[:index], UNKNOWN, *EPISODE[index:]], [SINGLE]],
            [[*FULL[0][:index], [], *FULL[0][index:]], FULL[1]],
        )
        for index in range(3)
    },
    **{
        f"sequence {index} empty": (
            [*[EPISODE, [SINGLE]][:index], [UNKNOWN], *[EPISODE, [SINGLE]][index:]],
            [*FULL[:index], [[]], *FULL[index:]],
        )
        for index in range(3)
    },
    "an episode of empty segments": ([EPISODE, [UNKNOWN, UNKNOWN], [SINGLE]], [FULL[0], [[], []], FULL[1]]),
}


def by_hand(
    loss: str, theta: torch.Tensor, trained: Trained, advantages: list[float], *, equal_segments: bool
) -> torch.Tensor:
    """The loss in float64, from the definitions: the episode is the sequence, and what is empty counts nowhere."""
    table = theta.log_softmax(-1)
    num_tokens = sum(len(segment) for episode in trained for segment in episode)
    num_sequences = sum(any(episode) for episode in trained)
    total = torch.zeros((), dtype=torch.float64)
    for episode, advantage in zip(trained, advantages, strict=True):
        segments = [segment for segment in episode if segment]
        if not segments:
            continue
        length = sum(map(len, segments))
        weights = [
            [length / (len(segments) * len(segment)) if equal_segments else 1.0] * len(segment) for segment in segments
        ]
        flat = [w for row in weights for w in row]
        logs = torch.stack([table[before, token] for segment in segments for before, token in segment])
        ratios = (logs - MU).exp()
        if loss == "gspo":
            # One ratio an episode; its value is that of the mean over all tokens, its gradient is weighed by segment.
            value = (logs - MU).mean().exp().detach()
            terms = [value * (1 + log - log.detach()) for log in logs]
            total = total - advantage * sum(w * t for w, t in zip(flat, terms, strict=True)) / length / num_sequences
        else:
            divisor = {
                "token_mean": num_tokens,
                "token_sum": 1,
                "token_sum_norm": 8,
                "seq_mean_token_sum": num_sequences,
                "seq_mean_token_mean": length * num_sequences,
                "seq_mean_token_sum_norm": 8 * num_sequences,
            }[loss]
            total = total - advantage * sum(w * r for w, r in zip(flat, ratios, strict=True)) / divisor
    return total


def gradient(samples: list[TrainingSample], loss: LossConfig, theta: torch.Tensor, budget: int) -> torch.Tensor:
    """The gradient of our loss, packed into rows of ``budget`` tokens."""
    joins = "sequence_ids" in loss.required_inputs
    packed = Packer(RowShape(), 1, None, equal_rows=False).pack(samples, budget, joins_segments=joins)
    total = torch.zeros((), dtype=torch.float64)
    for row in packed.batches:
        row = add_token_weights(row, packed.totals, loss)
        logprobs = theta.log_softmax(-1)[row.tokens, row.labels]
        assert row.rollout_logprobs is not None
        inputs = LossInputs(
            logprobs=logprobs,
            rollout_logprobs=row.rollout_logprobs.double(),
            advantages=row.advantages,
            loss_mask=row.loss_mask,
            sequence_ids=row.sequence_ids,
            token_weights=row.token_weights,
        )
        total = total + policy_loss(inputs, loss).loss_sum
    (result,) = torch.autograd.grad(total / packed.totals.num_tokens, theta)
    return result


@pytest.mark.parametrize("equal_segments", [False, True])
@pytest.mark.parametrize("loss", [*get_args(Aggregation), "gspo"])
@pytest.mark.parametrize("name", EPISODES)
def test_the_gradient_of_episodes_in_segments_is_that_by_hand(
    name: str, loss: str, equal_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "all_gather_integers", lambda values, group: torch.tensor([values]))
    wide = {"clip_ratio_low": 0.999, "clip_ratio_high": 1e6}
    norm = {"horizon": 8} if loss.endswith("norm") else {}
    settings = (
        LossConfig(name="gspo", **wide)
        if loss == "gspo"
        else LossConfig(name="ppo_clip", aggregation=loss, **wide, **norm)
    )
    theta = torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    episodes, trained = EPISODES[name]
    advantages = [0.5, -1.5, 0.75][: len(episodes)]
    completions = [join_segments(episode, len(episode) - 1) for episode in episodes]
    rollouts = tuple(Rollout(prompt=TASK, completion=each, reward=0.0) for each in completions)
    samples = to_samples([RolloutGroup(prompt=TASK, rollouts=rollouts)], [advantages])
    assert [len(indices) for indices in group_segments(samples)] == [len(episode) for episode in episodes]
    samples = with_episode_tokens(samples, equal_segments=equal_segments)
    hand = by_hand(loss, theta, trained, advantages, equal_segments=equal_segments)
    (expected,) = torch.autograd.grad(hand, theta)
    # All in one row; and the segments of the episode apart, where the loss allows it.
    for budget in (100, 5):
        result = gradient(samples, settings, theta, budget)
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
    if loss == "token_mean" and not equal_segments:
        # As rows of a token mean: segments need nothing.
        rows = [replace(each, segment=0, episode_loss_tokens=None) for each in samples]
        torch.testing.assert_close(gradient(rows, settings, theta, 100), expected, rtol=1e-6, atol=1e-9)


def test_mini_batches_keep_episodes_together() -> None:
    episodes = [[0, 1, 2], [3], [4, 5], [6]]
    for epoch in range(3):
        batches = split_into_mini_batches(len(episodes), 2, seed=1, epoch=epoch)
        assert sorted(i for batch in batches for e in batch for i in episodes[e]) == list(range(7))
        assert [len(batch) for batch in batches] == [2, 2]


def test_joined_segments_can_be_cut_again() -> None:
    joined = join_segments(EPISODE, 1)
    assert joined.segment_lengths == (7, 3) and len(joined.token_ids) == 10
    for part, original in zip(joined.segments, EPISODE, strict=True):
        assert same(part.token_ids, original.token_ids) and same(part.loss_mask, original.loss_mask)
    bounds = list(pairwise([0, 7, 10]))
    assert json.dumps([joined.token_ids[a:b].tolist() for a, b in bounds]) == json.dumps(
        [each.token_ids.tolist() for each in EPISODE]
    )
