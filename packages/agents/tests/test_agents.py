"""Agents: what they are answered, and the sequences of tokens that come of it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch

from columns import same
from fake_servers import logprob, routes
from megatron_dppo.config.io import load_config
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.data.training_samples import to_samples
from megatron_dppo.errors import ConfigError, GenerateError
from megatron_dppo.rewards.item import RewardResult
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.types import Prompt, PromptLimits, RolloutGroup, SamplingParams
from megatron_dppo_agents import generate, runner
from megatron_dppo_agents.agent_request import CallError
from megatron_dppo_agents.completions_api import read_chat, read_completion
from megatron_dppo_agents.generate import MAX_FAILURES, AgentFunction
from megatron_dppo_agents.runner import INHERITED_VARIABLES, AgentTask, run_with_time_limit
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.formats import FORMATS
from megatron_dppo_conversations.rules import ConversationError
from tests.engines.tiny import byte_tokenizer
from tests.unit.configs import config
from tests.unit.engines.test_server_engine import publish
from tests.unit.scripted import CALL, TASK, TEMPLATE, TOOLS, World, chat_tokenizer


async def post(
    task: AgentTask, path: str, body: Any, key: str | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {task.api_key if key is None else key}", **(headers or {})}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(task.base_url + path, json=body) as response,
    ):
        text = await response.text()
        return response.status, text if "event-stream" in response.headers["Content-Type"] else json.loads(text)


async def chat(task: AgentTask, messages: Any, **more: Any) -> Any:
    status, body = await post(task, "/chat/completions", {"model": "m", "messages": messages, **more})
    assert status == 200, body
    return body["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_form_one_sequence_equal_to_the_chat_template(world: World) -> None:
    world.script = {
        "1+2<|im_end|>\n<|im_start|>assistant\n": CALL,
        "3</tool_response><|im_end|>\n<|im_start|>assistant\n": "It is 3",
    }
    messages_sent = []

    async def agent(task: AgentTask) -> None:
        assert (task.prompt, task.label, list(task.messages)) == ("1+2", "3", [user("1+2")])
        messages = [user(task.prompt)]
        answer = await chat(task, messages, tools=TOOLS)
        (call,) = answer["tool_calls"]
        assert answer["content"] is None and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        # As clients do: other keys, arguments written anew.
        call["function"]["arguments"] = '{"b":2, "a":1}'
        messages += [answer | {"audio": None}, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        last = await chat(task, messages, tools=TOOLS)
        assert last["content"] == "It is 3" and "tool_calls" not in last
        messages_sent.append(
            [
                *messages[:1],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
                },
                messages[2],
                last,
            ]
        )

    result = world.play(agent, params={"topk_logprobs": 2, "routed_experts": True})
    rendered = world.tokenizer.apply_chat_template(messages_sent[0], tools=TOOLS, tokenize=False)
    assert world.text(result) + "\n" == rendered
    assert world.trained(result) == [f"{CALL}<|im_end|>", "It is 3<|im_end|>"]
    assert result.text == f"{CALL}\nuser\n<tool_response>3</tool_response>\nassistant\nIt is 3" and not result.failure
    counted = {name: value for name, value in result.counts.items() if value and not name.startswith("agent/tool_")}
    assert counted == {"agent/calls": 2, "agent/sequences": 1, "agent/segments": 1}
    assert len(result.counts) == 19 and result.segments == (result,)
    mask, tokens = result.loss_mask, result.token_ids.tolist()
    assert mask is not None and result.logprobs is not None and result.topk_token_ids is not None
    assert result.logprobs.tolist() == [logprob(i, t, 4) if mask[i] else 0.0 for i, t in enumerate(tokens)]
    assert [(s.policy_version, s.end - s.start) for s in result.policy_versions] == [(4, len(CALL) + 1), (4, 8)]
    assert torch.equal(result.routed_experts, routes(0, len(tokens) - 1, 4))  # type: ignore[arg-type]
    assert world.server.requests[1].token_ids == tuple(tokens[: len(tokens) - 8])

    # What stands before the first answer is the sample's prompt.
    group = score_completions(Scorer(), [TASK], [result, result])[0]  # type: ignore[arg-type]
    assert [r.reward for r in group.rollouts] == [0.0, 1.0]
    (sample, _) = to_samples([group], [[-0.5, 0.5]])
    assert [*sample.tokens.tolist(), int(sample.labels[-1])] == tokens and sample.loss_mask.tolist() == mask[
        1:
    ].tolist()
    assert sample.labels[sample.loss_mask].tolist() == [t for t, on in zip(tokens, mask, strict=True) if on]
    assert sample.rollout_logprobs is not None
    assert same(sample.rollout_logprobs[sample.loss_mask], result.logprobs[mask])
    first = int(mask.int().argmax())
    assert sample.rollout_topk_ids is not None and torch.equal(sample.rollout_topk_ids, result.topk_token_ids[first:])


class Scorer:
    """Scorer that returns the index of each sample."""

    def score(self, items: Any, *, is_batch: bool) -> list[RewardResult]:
        return [RewardResult(reward=float(index)) for index, _ in enumerate(items)]


def test_reasoning_that_the_template_removes_stays_as_sampled(world: World) -> None:
    world.script = {
        "a<|im_end|>\n<|im_start|>assistant\n": "<think>hm</think>one",
        "b<|im_end|>\n<|im_start|>assistant\n": "two",
    }

    async def agent(task: AgentTask) -> None:
        answer = await chat(task, [user("a")])
        assert answer["content"] == "one" and answer["reasoning_content"] == "hm"
        await chat(task, [user("a"), answer, user("b")])

    result = world.play(agent)
    assert world.trained(result) == ["<think>hm</think>one<|im_end|>", "two<|im_end|>"]
    assert world.text(result).count("<think>") == 1 and result.counts["agent/sequences"] == 1


def test_a_truncated_response_is_closed_by_the_template(world: World) -> None:
    world.script = {"assistant\n": "long answer"}

    async def agent(task: AgentTask) -> None:
        status, body = await post(task, "/chat/completions", {"messages": [user("a")], "max_tokens": 4})
        assert (
            status == 200
            and body["choices"][0]["finish_reason"] == "length"
            and body["usage"] == {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}
        )
        assert body["choices"][0]["message"]["content"] == "long"
        await chat(task, [user("a"), {"role": "assistant", "content": "long"}, user("b")])

    result = world.play(agent)
    assert "long<|im_end|>\n<|im_start|>user\nb<|im_end|>" in world.text(result)
    assert world.trained(result) == ["long", "long answer<|im_end|>"]


def test_an_end_token_is_closed_once_and_other_text_at_a_limit_is_closed_whole(world: World) -> None:
    """The template ends an answer by an exclamation mark in the first case, and by its end token in the second."""
    world.script = {"assistant\n": "long!! answer"}

    async def agent(task: AgentTask) -> None:
        limit = {"max_tokens": len(said)}
        await chat(task, [user("a")], **limit)
        await chat(task, [user("a"), {"role": "assistant", "content": said}, user("b")], **limit)

    said = "long!"
    world.tokenizer = chat_tokenizer()
    end = "{% endfor %}<|im_end|>\n{% endif %}\n{%- endfor %}"
    assert end in TEMPLATE
    world.tokenizer.chat_template = TEMPLATE.replace(end, end.replace("<|im_end|>", "!<|im_end|>"))
    assert "assistant\nlong!!<|im_end|>\n<|im_start|>user\nb" in world.text(world.play(agent))

    # An engine may report the limit although it sampled the end token.
    def report_limit(request: Any, tokens: list[int], versions: list[int], reason: Any) -> Any:
        at_limit = len(tokens) == request.params.max_new_tokens
        return generation(request, tokens, versions, "length" if at_limit else reason)

    generation = world.server._generation
    world.server._generation = report_limit  # type: ignore[method-assign]
    world.tokenizer = chat_tokenizer()
    world.script = {"assistant\n": "four"}

    async def exact(task: AgentTask) -> None:
        messages = [user("a")]
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 5}
            _, response = await post(task, "/chat/completions", body)
            (choice,) = response["choices"]
            assert choice["finish_reason"] == "stop"
            messages = [*messages, choice["message"], user("b")]

    result = world.play(exact)
    assert world.trained(result) == ["four<|im_end|>"] * 2 and result.finish_reason == "stop"
    assert "<|im_end|><|im_end|>" not in world.text(result)


def test_a_call_continues_the_longest_conversation_with_the_same_tools(world: World) -> None:
    world.script = {"assistant\n": "ok"}
    other = [{"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}]

    async def agent(task: AgentTask) -> None:
        first = await chat(task, [user("a")], tools=TOOLS)
        await chat(task, [user("a"), first, user("b")], tools=TOOLS)
        # Another answer to the first message alone: a conversation of which the next call is a continuation, too.
        again = await chat(task, [user("a")], tools=TOOLS)
        await chat(task, [user("a"), again, user("b"), again, user("c")], tools=TOOLS)
        for tools in (other, []):
            await chat(task, [user("a"), first, user("b"), first, user("c"), first, user("d")], tools=tools)

    result = world.play(agent, 2000, segments="longest")
    assert result.counts["agent/sequences"] == 4, "two with the first tools, one for each change of them"
    sent = [world.tokenizer.decode(request.token_ids) for request in world.server.requests]
    assert sent[3].startswith(sent[1]) and '"sub"' in sent[4] and "function" not in sent[5]
    assert world.trained(result) == ["ok<|im_end|>"] * 3
    assert result.counts["agent/untrained_fraction"] == pytest.approx(1 / 2)


def test_of_two_sequences_with_as_many_tokens_the_newest_is_trained(world: World) -> None:
    world.script = {"a<|im_end|>\n<|im_start|>assistant\n": "one", "b<|im_end|>\n<|im_start|>assistant\n": "two"}

    async def agent(task: AgentTask) -> None:
        for text in ("a", "b"):
            await chat(task, [user(text)])

    assert world.trained(world.play(agent, segments="longest")) == ["two<|im_end|>"]


def test_a_tool_call_that_was_cut_off_is_reported_as_cut_off(world: World) -> None:
    """The limit comes after the end of the call, in the text behind it."""
    world.script = {"assistant\n": CALL + " and then some"}
    reasons = []

    async def agent(task: AgentTask) -> None:
        for limit in (len(CALL) + 4, 200):
            body = {"messages": [user(str(limit))], "max_tokens": limit, "tools": TOOLS}
            _, response = await post(task, "/chat/completions", body)
            reasons.append(response["choices"][0]["finish_reason"])

    result = world.play(agent, 1000)
    assert reasons == ["length", "tool_calls"] and result.finish_reason == "stop"


def test_rewritten_history_starts_a_new_sequence(world: World) -> None:
    world.script = {"x<|im_end|>\n<|im_start|>assistant\n": "no", "assistant\n": "a long answer"}

    async def agent(task: AgentTask) -> None:
        first = await chat(task, [user("a")])
        await chat(task, [user("other agent: x")])
        await chat(task, [user("a"), first, user("b")])  # goes on in spite of the call between
        await chat(task, [user("summary: x")])
        await chat(task, [{"role": "system", "content": "changed"}, user("a"), first, user("x")])

    longest = world.play(agent, segments="longest")
    assert world.trained(longest) == ["a long answer<|im_end|>"] * 2
    assert longest.counts["agent/untrained_fraction"] == pytest.approx(9 / 37)
    assert longest.counts["agent/untrained/shorter"] == longest.counts["agent/untrained_fraction"]
    assert longest.counts["agent/segments"] == 1 and not longest.segment_lengths
    world.server.requests.clear()
    result = world.play(agent)
    parts = [world.trained(segment) for segment in result.segments]
    assert parts == [["a long answer<|im_end|>"] * 2, *[["no<|im_end|>"]] * 3]
    assert result.counts["agent/sequences"] == 4 and result.counts["agent/calls"] == 5
    assert result.counts["agent/untrained_fraction"] == 0 and result.counts["agent/forks/history"] == 1
    assert [len(r.token_ids) for r in world.server.requests] == sorted(
        {len(r.token_ids) for r in world.server.requests}, key=[len(r.token_ids) for r in world.server.requests].index
    )


def test_completions_continue_by_text_and_by_tokens(world: World) -> None:
    world.script = {"2+2=": "4", "so 4+4=": "8"}

    async def by_text(task: AgentTask) -> None:
        status, body = await post(task, "/completions", {"prompt": "2+2=", "temperature": 0.0, "top_p": 0.9})
        assert status == 200 and body["choices"][0]["text"] == "4"
        _, body = await post(task, "/completions", {"prompt": "2+2=4 so 4+4=", "temperature": None})
        assert body["object"] == "text_completion" and body["choices"][0]["text"] == "8"

    result = world.play(by_text)
    assert world.text(result) == "2+2=4<|im_end|> so 4+4=8<|im_end|>" and result.counts["agent/ignored_settings"] == 2
    assert result.counts["agent/sequences"] == 1 and world.trained(result) == ["4<|im_end|>", "8<|im_end|>"]

    async def by_tokens(task: AgentTask) -> None:
        start = world.encode("2+2=")
        await post(task, "/completions", {"prompt": start})
        more = world.encode("4<|im_end|> so 4+4=")
        await post(task, "/completions", {"prompt": [[*start, *more]]})

    assert same(world.play(by_tokens).token_ids, result.token_ids)


def test_streaming_returns_the_same_response_in_chunks(world: World) -> None:
    world.script = {"assistant\n": f"Let me see. {CALL}"}
    events = []

    async def agent(task: AgentTask) -> None:
        body = {"messages": [user("a")], "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        _, text = await post(task, "/chat/completions", body)
        events.extend(re.findall(r"data: (.*)\n\n", text))

    world.play(agent)
    assert events[-1] == "[DONE]"
    bodies = [json.loads(event) for event in events[:-1]]
    deltas = [c["delta"] for body in bodies for c in body["choices"]]
    assert deltas[0]["role"] == "assistant" and deltas[1] == {"content": "Let me see."}
    assert deltas[2]["tool_calls"][0]["index"] == 0 and deltas[2]["tool_calls"][0]["function"]["name"] == "add"
    assert bodies[-2]["choices"][0]["finish_reason"] == "tool_calls" and bodies[-1]["usage"]["completion_tokens"] > 9


def test_a_call_in_a_thought_that_the_template_opened_is_not_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert opened != TEMPLATE
    monkeypatch.setattr(world.tokenizer, "chat_template", opened)
    world.script = {"a<|im_end|>\n<|im_start|>assistant\n<think>\n": f"try {CALL}"}
    world.script["b<|im_end|>\n<|im_start|>assistant\n<think>\n"] = f"no</think>{CALL}"
    answers = []

    async def agent(task: AgentTask) -> None:
        answers.extend([await chat(task, [user(text)], tools=TOOLS) for text in ("a", "b")])

    world.play(agent)
    assert "tool_calls" not in answers[0] and answers[0]["reasoning_content"] == f"try {CALL}"
    assert answers[0]["content"] == "" and answers[1]["content"] is None and answers[1]["reasoning_content"] == "no"
    assert [call["function"]["name"] for call in answers[1]["tool_calls"]] == ["add"]


def test_invalid_tool_calls_stay_text() -> None:
    hermes = FORMATS["hermes"]
    for text, malformed in {
        "plain": 0,
        "<tool_call>{bad}</tool_call>": 1,
        '<tool_call>{"name": "f"': 1,
        "<tool_call>[1]</tool_call>": 0,
        CALL + '<tool_call>{"name": 1}</tool_call>': 1,
        CALL.replace("1", "NaN"): 1,
        f"{CALL}<tool_call>": 1,
    }.items():
        parsed = hermes.parse(text, TOOLS)
        assert (parsed.text, parsed.tool_calls, parsed.num_malformed) == (text, (), malformed)
    parsed = hermes.parse(f"so: {CALL}\n{CALL}", TOOLS)
    assert parsed.content == "so:" and [call["function"]["name"] for call in parsed.tool_calls] == ["add", "add"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "no JSON object"),
        ({}, "'messages' is missing"),
        ({"messages": [user("a")], "n": 2}, "'n' = 2 is not supported"),
        ({"messages": [user("a")], "top_logprobs": 2}, "'top_logprobs' = 2 is not supported"),
        ({"messages": [user("a")], "response_format": {"type": "json_schema"}}, "'response_format' = 'json_schema'"),
        ({"messages": [user("a")], "max_tokens": 0}, "'max_tokens' = 0, expected a whole number"),
        ({"messages": [{"role": "robot"}]}, r"messages\[0\] has the role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part that is"),
        ({"messages": [user("a")], "tools": ["f"]}, "the type 'str'"),
    ],
)
def test_invalid_requests_are_rejected(body: Any, words: str) -> None:
    with pytest.raises((CallError, ConversationError), match=words):
        read_chat(body)


def test_different_sampling_settings_are_counted() -> None:
    body = {"messages": [user("a")], "temperature": 0.3, "top_p": None, "stop": [], "frequency_penalty": 0.0}
    assert read_chat(body).ignored == ("temperature",)
    forced = body | {"tools": TOOLS, "tool_choice": "required", "stop": "x"}
    assert read_chat(forced).ignored == ("temperature",) and read_chat(forced).stop == ("x",)
    assert read_chat(forced).forced_tool == "add" and read_chat(body | {"tools": TOOLS}).forced_tool is None
    assert not read_chat(body | {"tools": TOOLS, "tool_choice": "none"}).reads_tool_calls
    assert read_chat(body | {"max_tokens": 9, "max_completion_tokens": 4}).limit == 4
    with pytest.raises(CallError, match="'prompt' is missing"):
        read_completion({"prompt": ["a", "b"]})


def test_keys_are_valid_only_during_their_episode_and_rewards_count(world: World) -> None:
    world.script = {"assistant\n": "ok"}
    tasks = []

    async def agent(task: AgentTask) -> None:
        tasks.append(task)
        assert task.api_key not in repr(task)
        for key in ("", "sk-wrong", tasks[0].api_key if len(tasks) > 1 else "x"):
            status, body = await post(task, "/chat/completions", {"messages": [user("a")]}, key)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
        status, body = await post(task, "/reward", {"reward": True})
        assert status == 400 and 'expected {"reward": NUMBER}' in body["error"]["message"]
        status, body = await post(task, "/chat/completions", {"messages": [user("a" * 3000)]})
        assert status == 413 and "Maximum request body size 2000 exceeded" in body["error"]["message"]
        status, body = await post(task, "/nothing", {})
        assert status == 404 and body["error"]["type"] == "invalid_request_error"
        status, body = await post(task, "/chat/completions", {"messages": [user("\ud800")]})
        assert status == 400 and "cannot be encoded" in body["error"]["message"]
        status, body = await post(task, "/completions", {"prompt": [1, 2**40]})
        assert status == 400 and "there is no token 1099511627776" in body["error"]["message"]
        await chat(task, [user("a")])
        for value in (1, -0.5):
            assert (await post(task, "/reward", {"reward": value}))[0] == 200

    engine = world.engine(agent, reward="call", max_body_bytes=2000, max_running=1)
    result = engine.generate([TASK, TASK], SamplingParams(max_new_tokens=100))
    assert [(c.reward, c.failure) for c in result] == [(-0.5, "")] * 2


def test_an_episode_with_an_exhausted_budget_is_truncated_and_has_not_failed(world: World) -> None:
    world.script = {"assistant\n": "a long answer"}

    async def agent(task: AgentTask) -> None:
        messages: list[Any] = [user("a")]
        for _ in range(9):
            status, body = await post(task, "/chat/completions", {"messages": messages})
            if status != 200:
                assert status == 400 and body["error"]["code"] in ("context_length_exceeded", "max_calls")
                raise RuntimeError("as clients do")
            messages += [body["choices"][0]["message"], user("more")]

    for settings, tokens, answers in (({}, 90, 2), ({"max_calls": 3}, 900, 3)):
        result = world.play(agent, tokens, **settings)
        assert result.finish_reason == "length" and not result.failure and result.counts["agent/calls"] == answers
        assert len(result.token_ids) <= tokens and len(world.trained(result)) == answers


@pytest.mark.parametrize(
    ("settings", "failure"),
    [
        ({}, "ValueError: bad luck"),
        ({"reward": "exit"}, "ValueError: bad luck"),
        ({"reward": "call"}, "ValueError: bad luck"),
    ],
)
def test_a_failing_agent_loses_only_its_sample(world: World, settings: Any, failure: str, tmp_path: Path) -> None:
    world.script = {"assistant\n": "ok"}
    order = iter(range(9))

    async def agent(task: AgentTask) -> float:
        if next(order) % 2:
            raise ValueError("bad luck")
        await chat(task, [user("a")])
        status, body = await post(task, "/reward", {"reward": 2.0})
        is_taken = settings.get("reward") == "call"
        assert status == (200 if is_taken else 403) and (is_taken or "agent.reward = 'call'" in str(body))
        return 2

    result = world.engine(agent, **settings).generate([TASK, TASK], SamplingParams(max_new_tokens=100))
    bad, good = sorted(result, key=lambda c: not c.failure)
    given = 2.0 if settings else None
    assert bad.failure == failure and len(bad.token_ids) == 2 and (good.reward, good.failure) == (given, "")
    groups = score_completions(Scorer(), [TASK], [bad, good])  # type: ignore[arg-type]
    assert [(r.reward, r.reward_failed) for r in groups[0].rollouts] == [(0.0, True), (2.0 if settings else 0.0, False)]
    metrics = rollout_metrics(groups, to_samples(groups, [[0.0, 1.0]]))
    assert metrics["reward_failed_fraction"].numerator == metrics["agent/failed_fraction"].numerator == 1
    assert metrics["agent/failed_fraction"].denominator == 2 and metrics["agent/calls"].numerator == 1
    save_groups(tmp_path / "f", [StoredRollouts(0, TASK, groups[0])])
    (stored,) = load_groups(tmp_path / "f", lambda index: TASK)
    assert isinstance(stored.content, RolloutGroup)
    assert stored.content.rollouts[0].completion.failure == failure and same(stored.content, groups[0])


@pytest.mark.parametrize("before", [[], ["a"]])
@pytest.mark.parametrize("tokens", [100, 24])
def test_an_agent_that_ends_during_a_call_ends_no_run(world: World, before: list[str], tokens: int) -> None:
    world.script = {"a<|im_end|>\n<|im_start|>assistant\n": "ok", "b<|im_end|>\n<|im_start|>assistant\n": LONG}
    open_calls: list[asyncio.Task[Any]] = []

    async def agent(task: AgentTask) -> float:
        for text in before:
            await chat(task, [user(text)])
        count = len(world.server.requests)
        open_calls.append(asyncio.create_task(post(task, "/chat/completions", {"messages": [user("b")]})))
        world.server.token_seconds = 0.05
        while len(world.server.requests) == count and not open_calls[0].done():
            await asyncio.sleep(0.01)
        world.server.token_seconds = 0
        return 0.5

    (completion,) = world.engine(agent, reward="exit").generate([TASK], SamplingParams(max_new_tokens=tokens, seed=1))
    if before:
        assert not completion.failure and completion.reward == 0.5 and world.trained(completion) == ["ok<|im_end|>"]
    else:
        assert completion.failure == "the agent ended without a response of the policy"
        assert completion.loss_mask is not None and completion.loss_mask.tolist() == [False, True]
    assert completion.counts["agent/sequences"] == 1 and completion.counts["agent/untrained_fraction"] == 0


def test_an_agent_that_always_fails_stops_the_run(world: World) -> None:
    async def agent(task: AgentTask) -> None:
        raise ValueError("no such tool")

    engine, how = world.engine(agent), SamplingParams(max_new_tokens=100)
    assert all(c.failure for c in engine.generate([TASK] * (MAX_FAILURES - 1), how))
    with pytest.raises(GenerateError, match=r"64 episodes .*the last: ValueError"):
        engine.generate([TASK], how)


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def call(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
answer = call("/chat/completions", {"messages": task["messages"]})["choices"][0]["message"]["content"]
assert task["api_key"] == os.environ["OPENAI_API_KEY"] and task["base_url"] == os.environ["OPENAI_BASE_URL"]
"""


def program(code: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM + code]


def test_programs_receive_a_task_and_report_by_exit_status(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.script = {"assistant\n": "ok"}
    monkeypatch.setenv("RANK", "0")
    result = world.play(program("sys.exit(answer != 'ok' or task['label'] != '3')"), reward="exit")
    assert (result.reward, result.failure) == (1.0, "") and world.trained(result) == ["ok<|im_end|>"]
    result = world.play(program("sys.exit(3)"), reward="exit")
    assert (result.reward, result.failure) == (0.0, "")
    result = world.play(program("print('x' * 9000 + os.environ['OPENAI_API_KEY']); sys.exit(3)"))
    assert result.reward is None and re.search(r"ended with status 3: x{1000,2000}\*\*\*$", result.failure)
    result = world.play(program("call('/reward', {'reward': 0.25})"), reward="call")
    assert (result.reward, result.failure) == (0.25, "")
    result = world.play([sys.executable, "-c", ""], reward="call")
    assert result.failure == 'the agent ended without POST /v1/reward {"reward": NUMBER}' and len(result.token_ids) == 2


def test_a_program_is_over_when_its_process_ends_although_a_child_holds_its_output(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OUTPUT_SECONDS", 0.1)
    world.script = {"assistant\n": "ok"}
    child = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n"
    for ending, reward in (("", 1.0), ("print('bad', flush=True)\nos._exit(3)", 0.0)):
        result = world.play(program(f"{child}{ending}"), reward="exit", timeout_seconds=60.0)
        assert (result.reward, result.failure) == (reward, "")


def test_a_program_at_its_time_limit_leaves_no_traceback(world: World, caplog: pytest.LogCaptureFixture) -> None:
    result = world.play(program("import time; time.sleep(60)"), timeout_seconds=0.5)
    gc.collect()
    assert "took longer" in result.failure and "never retrieved" not in caplog.text


def test_a_slow_program_is_killed_but_waiting_for_the_policy_does_not_count(world: World) -> None:
    world.script = {"assistant\n": "ok"}
    world.server.token_seconds = 0.5

    async def agent(task: AgentTask) -> None:
        await chat(task, [user("a")])

    assert not world.play(agent, timeout_seconds=1.0).failure, "three tokens took 1.5 seconds"
    result = world.play(program("import time; time.sleep(60)"), timeout_seconds=1.0)
    assert result.failure == "took longer than agent.timeout_seconds = 1"


def test_episodes_have_the_limits_of_their_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted by the program, and tokens by the test: neither is taken from the episode."""
    world.script = {"assistant\n": "a long answer"}
    is_asleep = asyncio.Event()

    async def limit_when_asleep(agent: Any, episode: Any, seconds: float) -> Any:
        """Begin the short limit when the slow agent has had its response, on a busy machine too."""
        running = asyncio.ensure_future(agent)
        if seconds == 0.2:
            await is_asleep.wait()

        async def finish() -> Any:
            return await running

        try:
            return await run_with_time_limit(finish(), episode, seconds)
        finally:
            running.cancel()

    monkeypatch.setattr(generate, "run_with_time_limit", limit_when_asleep)
    calls: dict[str, int] = {}
    refusals: dict[str, str] = {}

    async def agent(task: AgentTask) -> None:
        messages: list[Any] = [user("a")]
        for count in range(9):
            status, body = await post(task, "/chat/completions", {"messages": messages})
            if status != 200:
                refusals[task.label] = body["error"]["message"]
                return
            calls[task.label] = count + 1
            messages += [body["choices"][0]["message"], user("more")]
            if task.label == "slow":
                is_asleep.set()
                await asyncio.sleep(600)

    limits: dict[str, dict[str, Any]] = {
        "run": {},
        "calls": {"max_calls": 2},
        "slow": {"timeout_seconds": 0.2},
        "short": {"max_new_tokens": 90},
    }
    tasks = [replace(TASK, label=name, limits=PromptLimits(source=name, **each)) for name, each in limits.items()]
    settings = SamplingParams(max_new_tokens=900, seed=1)
    found = world.engine(agent, max_calls=4, timeout_seconds=300.0).generate(
        [replace(TASK, label="plain"), *tasks], settings
    )
    assert calls == {"plain": 4, "run": 4, "calls": 2, "slow": 1, "short": 2}
    assert {name: text.partition(" (")[2][:-1] for name, text in refusals.items() if name != "short"} == {
        "plain": "agent.max_calls",
        "run": "agent.max_calls",
        "calls": 'data.sources."calls".max_calls',
    }
    assert "may have 90 tokens" in refusals["short"] and len(found[4].token_ids) <= 90 < len(found[0].token_ids)
    assert [c.failure for c in found] == ["", "", "", 'took longer than data.sources."slow".timeout_seconds = 0.2', ""]


LONG = "a very long answer " * 40


@pytest.mark.slow
def test_stopped_episodes_cancel_their_agents_and_continue_later(world: World) -> None:
    world.script = {"quick<|im_end|>\n<|im_start|>assistant\n": "ok", "assistant\n": LONG}
    world.server.token_seconds = 0.002
    cancelled = []

    async def agent(task: AgentTask) -> None:
        try:
            while task.prompt == "quick" and len(world.server.requests) < 2:  # until both of the others are under way
                await asyncio.sleep(0.01)
            await chat(task, [user(task.prompt)])
            if task.prompt != "quick":
                await chat(task, [user(task.prompt), {"role": "assistant", "content": LONG}, user("quick")])
        except asyncio.CancelledError:
            cancelled.append(task.prompt)
            raise

    def prompt(text: str) -> Prompt:
        return Prompt(prompt_id=text, text=text, token_ids=(7,), label="", messages=(user(text),), is_task=True)

    engine = world.engine(agent)
    groups = [GroupRequest(0, prompt("slow"), 2), GroupRequest(1, prompt("quick"), 2)]
    how = SamplingParams(max_new_tokens=1000, seed=1)
    slow, quick = [future.result(30) for future in engine.submit(groups, how, 1, [0, 1])]
    assert slow is None and quick is not None and cancelled == ["slow"] * 2
    held = engine.unfinished()[0]
    had = [state.token_ids for state in held]
    assert all(23 < len(tokens) < len(LONG) for tokens in had)
    publish(engine, [world.server], 5)
    (group,) = [future.result(30) for future in engine.submit(groups[:1], how, 1)]
    assert group is not None
    for completion, before in zip(group, had, strict=True):
        assert same(completion.token_ids[: len(before)], before) and not completion.failure
        assert world.trained(completion) == [f"{LONG}<|im_end|>", "ok<|im_end|>"]
        assert [span.policy_version for span in completion.policy_versions][:2] == [4, 5]


def test_templates_that_change_earlier_tokens_have_no_continuation(tokenizer: Any) -> None:
    other = byte_tokenizer(["<pad>", "<|im_start|>", "<|im_end|>"])
    other.chat_template = (
        "{{ messages | length }}{% for m in messages %}<{{ m.content }}>{{ messages | length }}{% endfor %}"
    )
    known = [user("a"), {"role": "assistant", "content": "b"}]
    assert ChatTemplate(other, {}).continuation(known, [user("c")], []) is None
    result = ChatTemplate(tokenizer, {}).continuation(known, [user("c")], [])
    assert result == "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    other.chat_template = None
    with pytest.raises(CallError, match="no chat template"):
        ChatTemplate(other, {}).opening(known, [])
    other.chat_template = "{{ raise_exception('roles') }}"
    with pytest.raises(CallError, match="refuses the messages"):
        ChatTemplate(other, {}).opening(known, [])


def test_agent_rows_keep_their_messages_and_start_without_tokens(tokenizer: Any) -> None:
    chats = [{"role": "system", "content": "s"}, user("b")]
    rows = [DataRow("f:1", "a?", "1", is_problem=True), DataRow("f:2", chats, "2")]
    settings = {"max_prompt_tokens": 99, "max_new_tokens": 8, "context_length": 200}
    for are_tasks in (False, True):
        first, second = [PromptDataset(rows, tokenizer, are_tasks=are_tasks, **settings)[i] for i in range(2)]
        assert first.messages == ((user("a?"),) if are_tasks else None) and second.messages == tuple(chats)
        assert first.context_ids == (() if are_tasks else first.token_ids) and len(first.token_ids) > 20


def test_agent_files_are_relative_to_the_configuration() -> None:
    example = Path(__file__).parents[3] / "examples/agents"
    command = load_config(example / "calculator.toml").agent.command
    assert command is not None and command[0] == "python" and Path(command[1]).resolve() == example / "calculator.py"


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: config(agent={"command": ["a"], "function": "a:b"}), "both set"),
    (lambda: config(agent={"command": []}), "names no program"),
    (lambda: config(agent={"timeout_seconds": 3.0}), "has no effect without an agent"),
    (lambda: config(agent={"command": ["a"]}, rollout={"generate": "a:b"}), "both produce the responses"),
    (lambda: config(agent={"command": ["a"], "max_running": 3}), "with rollout.engine = 'local'"),
    (lambda: config(agent={"command": ["a"]}, data={"system_prompt": "x"}), "data.system_prompt has no effect"),
    (lambda: AgentFunction(AgentConfig(command=["no-such-program"]), {}), "no program 'no-such-program'"),
    (lambda: AgentFunction(AgentConfig(function="json:nothing"), {}), "agent.function = 'json:nothing'"),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_invalid_agent_settings_are_rejected(index: int) -> None:
    make, words = REFUSED[index]
    with pytest.raises((ValueError, ConfigError, GenerateError), match=words):
        make()


SPY = """
import json, os, sys
task = json.load(sys.stdin)
with open(task["metadata"]["file"], "w") as file:
    json.dump([task["api_key"], dict(os.environ)], file)
for path in (f"/proc/{task['metadata']['other']}/environ", f"/proc/{task['metadata']['other']}/mem"):
    try:
        open(path, "rb").read(1)
        sys.exit(path)
    except PermissionError:
        pass
try:
    os.kill(task["metadata"]["other"], 0)
    sys.exit("a signal")
except PermissionError:
    pass
os.kill(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "9"), 9)  # a child of its own
"""


def test_a_program_gets_a_clean_environment_and_cannot_read_other_processes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WANDB_API_KEY", "MY_SERVERS", "LC_TIME", "WANTED"):
        monkeypatch.setenv(name, "C")
    file = tmp_path / "seen"
    task = replace(TASK, metadata={"file": str(file), "other": os.getpid()})
    failures = {}
    for isolation in ("landlock", "none"):
        engine = world.engine([sys.executable, "-c", SPY], reward="exit", isolation=isolation, pass_env=["WANTED"])
        (completion,) = engine.generate([task], SamplingParams(max_new_tokens=100))
        failures[isolation] = completion.reward
        key, environment = json.loads(file.read_text())
        own = {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"}
        own |= {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} if isolation == "landlock" else set()
        passed = {"PATH", "HOME", "LC_TIME", "WANTED", *own}
        assert passed <= set(environment) and not set(environment) & {"RANK", "WANDB_API_KEY", "MY_SERVERS"}
        assert set(environment) <= {*passed, *INHERITED_VARIABLES, "LC_CTYPE"}, "PEP 538: Python sets LC_CTYPE itself"
        keys = {environment.get(name) for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")}
        assert key.startswith("sk-") and keys == {key if "OPENAI_API_KEY" in own else None}
        assert environment["OPENAI_BASE_URL"] == environment["ANTHROPIC_BASE_URL"] + "/v1"
    # Without isolation the same program reads the environment of this process.
    assert failures == {"landlock": 1.0, "none": 0.0}


def test_a_kernel_without_landlock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "landlock_version", lambda: -1)
    with pytest.raises(GenerateError, match=r"agent.isolation = 'none'"):
        AgentFunction(AgentConfig(command=["true"]), {})
    AgentFunction(AgentConfig(command=["true"], isolation="none"), {}).close()


@pytest.mark.parametrize("value", [1e39, float("nan"), None, "1", 10**400])
def test_a_function_that_returns_no_reward_has_failed(world: World, value: Any) -> None:
    async def agent(task: AgentTask) -> Any:
        return value

    (result,) = world.engine(agent, reward="exit").generate([TASK], SamplingParams(max_new_tokens=100))
    assert result.reward is None and "agent.function: the reward must" in result.failure


@pytest.mark.parametrize("separates", [True, False])
def test_thoughts_may_come_back_anywhere_or_not_at_all(world: World, separates: bool) -> None:
    """Changes that a program may make to the thoughts of an answer before it sends the answer back."""
    ways: list[Callable[[str, str], dict[str, str]]] = [
        lambda thought, text: {"content": f"<think>\n{thought}\n</think>\n\n{text}"},
        lambda thought, text: {"content": text, "reasoning_content": thought},
        lambda thought, text: {"content": text, "reasoning": thought},
        lambda thought, text: {"content": f" {text}\n"},
        lambda thought, text: {"content": f"<think>\n\n{thought}</think>{text}"},
    ]
    ends = [f"{index}<|im_end|>\n<|im_start|>assistant\n" for index in range(len(ways) + 1)]
    world.script = {end: f"<think>\nhm {index}\n</think>\n\nsaid {index}" for index, end in enumerate(ends)}

    async def agent(task: AgentTask) -> None:
        messages = [user("0")]
        for index, way in enumerate([*ways, ways[0]]):
            answer = await chat(task, messages)
            expected = {"content": f"said {index}", "reasoning_content": f"hm {index}"}
            if not separates:
                expected = {"content": f"<think>\nhm {index}\n</think>\n\nsaid {index}"}
            assert {name: answer.get(name) for name in expected} == expected
            assert ("reasoning_content" in answer) == separates
            back = {"role": "assistant", **way(f"hm {index}", f"said {index}")}
            messages += [back, user(str(index + 1))]

    result = world.play(agent, 2000, separate_reasoning=separates)
    assert result.counts["agent/sequences"] == 1 and result.counts["agent/untrained_fraction"] == 0
    assert world.trained(result) == [f"{said}<|im_end|>" for said in world.script.values()]


def test_tools_without_a_known_form_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.tokenizer, "chat_template", TEMPLATE.replace("tool_call>", "call>"))
    world.script = {"assistant\n": "x"}
    answers = []

    async def agent(task: AgentTask) -> None:
        body = {"messages": [user("a")], "tools": TOOLS}
        answers.append(await post(task, "/chat/completions", body))
        assert (await post(task, "/chat/completions", {**body, "tool_choice": "none"}))[0] == 200

    world.play(agent)
    status, body = answers[0]
    assert status == 400 and "no known form of tool calls" in body["error"]["message"]
    assert "agent.format" in body["error"]["message"] and "qwen3_xml" in body["error"]["message"]


def test_calls_of_another_form_are_read_and_malformed_ones_counted(world: World) -> None:
    xml = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    world.script = {"a<|im_end|>\n<|im_start|>assistant\n": xml, "b<|im_end|>\n<|im_start|>assistant\n": xml[:-5]}

    async def agent(task: AgentTask) -> None:
        (call,) = (await chat(task, [user("a")], tools=TOOLS))["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        answer = await chat(task, [user("b")], tools=TOOLS)
        assert "tool_calls" not in answer and answer["content"] == xml[:-5]

    assert world.play(agent, format="qwen3_xml").counts["agent/malformed_calls"] == 1


def test_rewards_read_the_text_in_the_form_that_the_run_names(world: World) -> None:
    """The chat template has no form. A box in a channel of thoughts is no answer."""
    analysis = "<|channel|>analysis<|message|>\\boxed{4}<|end|><|start|>assistant"
    world.script = {"assistant\n": f"{analysis}<|channel|>final<|message|>\\boxed{{3}}<|return|>"}

    async def agent(task: AgentTask) -> None:
        await chat(task, [user("a")])

    assert world.play(agent, 2000, format="gpt_oss").text == "<think>\\boxed{4}</think>\\boxed{3}"
    assert world.play(agent, 2000).text.startswith(analysis)


def test_a_renderer_reads_the_responses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the interface of ``renderers``, which reads ``CALL name`` as a call."""

    class Renderer:
        def get_stop_token_ids(self) -> list[int]:
            return [world.tokenizer.eos_token_id]

        def parse_response(self, tokens: list[int], *, tools: Any, prompt_ids: list[int]) -> Any:
            text = world.tokenizer.decode(tokens, skip_special_tokens=True)
            assert tools == TOOLS and world.tokenizer.decode(prompt_ids).endswith("assistant\n")
            content, tag, name = text.partition("CALL ")
            start = len(world.encode(content))
            status = "ok" if name.isalpha() else "invalid_json"
            call = SimpleNamespace(
                name=name, arguments={"a": 1}, status=status, token_span=(start, len(tokens)), id=None
            )
            calls = [call] if tag else []
            return SimpleNamespace(content=content.strip(), reasoning_content="hm" if tag else None, tool_calls=calls)

    package = SimpleNamespace(create_renderer=lambda tokenizer, made: Renderer(), config_from_name=lambda name: name)
    monkeypatch.setitem(sys.modules, "renderers", package)
    world.script = {"a<|im_end|>\n<|im_start|>assistant\n": "so CALL add", "3</tool_response>": "x"}
    world.script["b<|im_end|>\n<|im_start|>assistant\n"] = "so CALL 5"

    async def agent(task: AgentTask) -> None:
        answer = await chat(task, [user("a")], tools=TOOLS)
        assert (answer["content"], answer["reasoning_content"]) == ("so", "hm")
        (call,) = answer["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        broken = await chat(task, [user("b")], tools=TOOLS)
        assert broken["content"] == "so CALL 5" and "tool_calls" not in broken

    result = world.play(agent, 2000, renderer="x")
    assert result.counts["agent/malformed_calls"] == 1
    assert result.text == "so CALL 5"


def test_a_missing_renderer_is_an_error_before_the_first_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(GenerateError, match=r"agent.renderer = 'qwen3' .*\[agents\]"):
        AgentFunction(AgentConfig(function="tests.unit.scripted:one", renderer="qwen3"), {})
    with pytest.raises(ValueError, match="both read"):
        AgentConfig(function="a:b", renderer="qwen3", format="hermes")
