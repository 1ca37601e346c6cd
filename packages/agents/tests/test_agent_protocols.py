"""Protocols of the endpoint on the wire: what official clients send, and the fields and events that they need."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from fake_servers import logprob
from megatron_dppo_agents.runner import AgentTask
from tests.unit.scripted import CALL, TOOLS, World, chat_tokenizer

THOUGHT = "<think>\nhm\n</think>\n\n"
FIRST = "1+2<|im_end|>\n<|im_start|>assistant\n"
SECOND = "</tool_response><|im_end|>\n<|im_start|>assistant\n"
SCRIPT = {SECOND: f"{THOUGHT}It is 3.", FIRST: f"{THOUGHT}{CALL}"}
PARAMETERS = {"type": "object"}
FLAT_TOOL = {"type": "function", "name": "add", "description": "", "parameters": PARAMETERS, "strict": False}
OWN_TOOL = {"name": "add", "description": "", "input_schema": PARAMETERS}


@pytest.fixture(autouse=True)
def script(world: World) -> None:
    world.script = SCRIPT


async def send(task: AgentTask, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
    """Send a request; the path is that behind the host. A stream is returned as its events."""
    headers = {"Authorization": f"Bearer {task.api_key}"} if headers is None else headers
    url = task.base_url.removesuffix("/v1") + path
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, url, json=body) as response,
    ):
        text = await response.text()
        if "event-stream" not in response.headers["Content-Type"]:
            return response.status, json.loads(text)
        return response.status, [read_event(part) for part in text.strip().split("\n\n")]


def read_event(text: str) -> dict[str, Any]:
    """Return an event's data; its name has to be the field ``type``."""
    name, data = text.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    return event


def play(world: World, agent: Callable[[AgentTask], Any], sampled: list[str], **settings: Any) -> Any:
    """Play an episode, which has to be one sequence with these responses."""
    result = world.play(agent, 2000, **settings)
    assert not result.failure and world.trained(result) == [f"{text}<|im_end|>" for text in sampled]
    assert result.counts["agent/sequences"] == 1 and result.counts["agent/untrained_fraction"] == 0
    return result


@pytest.mark.parametrize("stream", [False, True])
def test_messages_play_a_tool_loop_as_one_sequence(world: World, stream: bool) -> None:
    answers: list[Any] = []

    async def agent(task: AgentTask) -> None:
        key = {"x-api-key": task.api_key, "anthropic-version": "2023-06-01"}
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2"}]}]
        body = {"model": "m", "max_tokens": 300, "tools": [OWN_TOOL], "stream": stream, "metadata": {"user_id": "u"}}
        for _ in range(2):
            status, answer = await send(task, "/v1/messages?beta=true", {**body, "messages": messages}, key)
            assert status == 200
            message = merge_messages(answer) if stream else answer
            answers.append(message)
            messages.append({"role": "assistant", "content": message["content"]})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "3"}]}
                for block in message["content"]
                if block["type"] == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        count = {"model": "m", "messages": messages[:1], "tools": [OWN_TOOL]}
        status, counted = await send(task, "/v1/messages/count_tokens", count, key)
        assert status == 200 and counted == {"input_tokens": len(world.server.requests[0].token_ids)}

    result = play(world, agent, list(SCRIPT.values())[::-1])
    first, last = answers
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    assert first["content"][0]["thinking"] == "hm" and first["content"][0]["signature"]
    assert first["content"][1]["input"] == {"a": 1, "b": 2} and first["content"][1]["name"] == "add"
    assert (first["stop_reason"], last["stop_reason"], first["stop_sequence"]) == ("tool_use", "end_turn", None)
    assert last["content"][1:] == [{"type": "text", "text": "It is 3."}]
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "m")
    assert first["usage"]["output_tokens"] == len(THOUGHT + CALL) + 1 and result.counts["agent/ignored_settings"] == 0
    prompt = len(world.server.requests[0].token_ids)
    assert first["usage"]["input_tokens"] == prompt


def merge_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together from its events, as the SDK does."""
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    parts: dict[int, str] = {}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            continue
        block = message["content"][event["index"]]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(parts[event["index"]])
            continue
        assert event["type"] == "content_block_delta"
        kind = event["delta"]["type"]
        if kind == "input_json_delta":
            assert block["input"] == {}
            parts[event["index"]] = parts.get(event["index"], "") + event["delta"]["partial_json"]
        else:
            name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[kind]
            block[name] += event["delta"][name]
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


@pytest.mark.parametrize(("stream", "chained"), [(False, False), (True, False), (False, True)])
def test_responses_play_a_tool_loop_as_one_sequence(world: World, stream: bool, chained: bool) -> None:
    answers: list[Any] = []

    async def agent(task: AgentTask) -> None:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+2"}]}]
        body: dict[str, Any] = {"model": "m", "instructions": "Add.", "tools": [FLAT_TOOL], "stream": stream}
        for _ in range(2):
            status, answer = await send(task, "/v1/responses", {**body, "input": items, "store": False})
            assert status == 200
            answers.append(merge_items(answer) if stream else answer)
            output = answers[-1]["output"]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
                for item in output
                if item["type"] == "function_call"
            ]
            items = results if chained else [*items, *output, *results]
            body |= {"previous_response_id": answers[-1]["id"]} if chained else {}

    play(world, agent, list(SCRIPT.values())[::-1])
    first, last = answers
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    assert first["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    call = first["output"][1]
    assert json.loads(call["arguments"]) == {"a": 1, "b": 2} and call["name"] == "add" and call["id"] != call["call_id"]
    (message,) = last["output"][1:]
    assert message["content"] == [{"type": "output_text", "text": "It is 3.", "annotations": [], "logprobs": []}]
    assert (last["status"], last["error"], last["incomplete_details"]) == ("completed", None, None)
    assert last["instructions"] == "Add." and first["tools"] == [FLAT_TOOL]
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"]


def merge_items(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a response together from its events, as the SDK does, and compare it with that of the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress" and events[-1]["type"] == "response.completed"
    output: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        item = output[event["output_index"]]
        if kind == "output_item.done":
            assert item | {"status": "completed"} == event["item"] | {"status": "completed"}
            output[event["output_index"]] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith("_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        else:
            assert kind in ("output_text.done", "reasoning_text.done", "content_part.done"), kind
    assert output == events[-1]["response"]["output"]
    return events[-1]["response"]


def test_items_of_one_answer_are_one_message(world: World) -> None:
    """Text and calls in a row, as another model's history, and a cut-off answer."""
    world.script = {"assistant\n": "long answer"}

    async def agent(task: AgentTask) -> None:
        items = [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": "1+2"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "add"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
        ]
        body = {"model": "m", "input": items, "tools": [FLAT_TOOL], "max_output_tokens": 4}
        status, answer = await send(task, "/v1/responses", body)
        assert status == 200 and answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete"

    world.play(agent, 2000)
    sent = world.tokenizer.decode(world.server.requests[0].token_ids)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1+2<|im_end|>" in sent
    assert f"assistant\nI add.{call}<|im_end|>\n<|im_start|>user\n<tool_response>3</tool_response>" in sent


def test_tokens_in_and_tokens_out(world: World) -> None:
    answers = []

    async def agent(task: AgentTask) -> None:
        prompt = world.encode("<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n")
        params = {"max_tokens": 300, "logprobs": 1, "skip_special_tokens": False}
        result = f"\n<|im_start|>user\n<tool_response>3{SECOND}"
        for more in (prompt, world.encode(result)):
            tokens = [*(answers[-1][0] if answers else []), *more]
            body = {"model": "m", "token_ids": tokens, "sampling_params": params, "cache_salt": "1"}
            status, answer = await send(
                task,
                "/inference/v1/generate",
                body,
                {
                    "Authorization": f"Bearer {task.api_key}",
                    "X-Session-ID": "t",
                },
            )
            assert status == 200
            (choice,) = answer["choices"]
            answers.append(([*tokens, *choice["token_ids"]], choice))

    result = play(world, agent, list(SCRIPT.values())[::-1])
    assert answers[-1][0] == result.token_ids.tolist()
    assert result.logprobs is not None
    for tokens, choice in answers:
        assert choice["finish_reason"] == "stop"
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        start = len(tokens) - len(content)
        assert [each["logprob"] for each in content] == result.logprobs[start : len(tokens)].tolist()
    assert result.counts["agent/ignored_settings"] == 0


def test_chat_returns_logprobs_and_token_ids_when_asked(world: World) -> None:
    bodies: list[Any] = []

    async def agent(task: AgentTask) -> None:
        body = {"messages": [{"role": "user", "content": "1+2"}], "logprobs": True, "return_token_ids": True}
        bodies.append((await send(task, "/v1/chat/completions", body))[1])

    result = world.play(agent, 2000)
    (choice,) = bodies[0]["choices"]
    prompt = bodies[0]["prompt_token_ids"]
    assert [*prompt, *choice["token_ids"]] == result.token_ids.tolist()
    assert result.logprobs is not None
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == result.logprobs[len(prompt) :].tolist()
    assert content[0]["logprob"] == logprob(len(prompt), choice["token_ids"][0], 4)
    assert "".join(each["token"] for each in content) == f"{THOUGHT}{CALL}<|im_end|>"
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == f"{THOUGHT}{CALL}<|im_end|>"


def test_one_tool_call_at_a_time_ends_the_turn_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tokenizer whose tag is one token. Without one the setting is counted as ignored."""
    from tests.engines.tiny import byte_tokenizer
    from tests.unit.scripted import TEMPLATE

    made = byte_tokenizer(["<pad>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"])
    made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    made.chat_template = TEMPLATE
    for tokenizer, is_followed in ((made, True), (chat_tokenizer(), False)):
        world = World(tokenizer, monkeypatch)
        world.script = {SECOND: "It is 3.", FIRST: CALL + CALL}
        answers: list[Any] = []

        async def agent(task: AgentTask, answers: list[Any] = answers) -> None:
            messages: list[Any] = [{"role": "user", "content": "1+2"}]
            for _ in range(2):
                body = {"messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
                answer = (await send(task, "/v1/chat/completions", body))[1]["choices"][0]["message"]
                answers.append(answer)
                calls = answer.get("tool_calls", [])
                messages += [answer, *({"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls)]

        result = world.play(agent, 2000)
        assert len(answers[0]["tool_calls"]) == (1 if is_followed else 2)
        assert result.counts["agent/sequences"] == 1
        assert result.counts.get("agent/ignored/parallel_tool_calls", 0) == (0 if is_followed else 2)
        if is_followed:
            assert world.trained(result) == [CALL, "It is 3.<|im_end|>"]
            assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>3" in world.text(result)
        world.close()


ANTHROPIC = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
RESPONSES = {"model": "m", "input": "a"}
GENERATE = {"token_ids": [1, 2]}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
PDF = {"type": "document", "source": {}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {**ANTHROPIC, "messages": [{"role": "user", "content": [IMAGE]}]}, "type 'image'"),
    ("/v1/messages", {**ANTHROPIC, "messages": [{"role": "user", "content": [PDF]}]}, "type 'document'"),
    ("/v1/messages", {**ANTHROPIC, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
    ("/v1/messages", {**ANTHROPIC, "messages": []}, "'messages' is missing"),
    ("/v1/messages", {**ANTHROPIC, "messages": [{"role": "assistant", "content": "{"}]}, "cannot be given"),
    ("/v1/messages", {**ANTHROPIC, "messages": [{"role": "user", "content": "x" * 9000}]}, "prompt is too long"),
    ("/v1/messages", {**ANTHROPIC, "output_format": {"type": "json_schema"}}, "output format"),
    ("/v1/messages", {**ANTHROPIC, "max_tokens": 0}, "'max_tokens' = 0"),
    ("/v1/messages", {**ANTHROPIC, "tool_choice": {"type": "x"}}, "'tool_choice'"),
    ("/v1/responses", {**RESPONSES, "previous_response_id": "resp_x"}, "no response of this episode"),
    ("/v1/responses", {**RESPONSES, "tools": [{"type": "web_search"}]}, "'web_search'"),
    ("/v1/responses", {**RESPONSES, "input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ("/v1/responses", {**RESPONSES, "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ("/v1/responses", {**RESPONSES, "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("/v1/responses", {**RESPONSES, "background": True}, "'background'"),
    ("/v1/responses", {**RESPONSES, "input": []}, "'input' is missing"),
    ("/v1/responses", {**RESPONSES, "input": 3}, "'input' is missing"),
    ("/inference/v1/generate", {**GENERATE, "token_ids": [1, "a"]}, "'token_ids'"),
    ("/inference/v1/generate", {**GENERATE, "token_ids": [10**6]}, "there is no token"),
    ("/inference/v1/generate", {**GENERATE, "sampling_params": {"n": 2}}, "'n' = 2"),
    ("/inference/v1/generate", {**GENERATE, "sampling_params": {"logprobs": 5}}, "'logprobs' = 5"),
    ("/inference/v1/generate", {**GENERATE, "stream": True}, "'stream'"),
    ("/v1/chat/completions", {**CHAT, "n": 2}, "'n' = 2"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2, "logprobs": True}, "'top_logprobs' = 2"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "'response_format' = 'json_object'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
]


def test_what_is_not_served_is_refused_in_words_and_in_the_form_of_the_api(world: World) -> None:
    bodies: list[tuple[int, Any]] = []
    world.script = {"assistant\n": "x"}

    async def agent(task: AgentTask) -> None:
        for path, body, _ in REFUSED:
            bodies.append(await send(task, path, body))
        assert (await send(task, "/v1/chat/completions", CHAT))[0] == 200

    world.play(agent, 2000)
    for (path, _, words), (status, body) in zip(REFUSED, bodies, strict=True):
        assert status == 400 and words in body["error"]["message"], (path, words, body)
        if path == "/v1/messages":
            assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        else:
            assert body["error"]["type"] == "invalid_request_error" and "code" in body["error"]


def test_settings_that_are_not_followed_are_counted_by_name(world: World) -> None:
    world.script = {"assistant\n": "x"}

    async def agent(task: AgentTask) -> None:
        settings = {"temperature": 0, "top_p": 0.5, "seed": 1, "tool_choice": "auto", "tools": TOOLS}
        without = {"user": "u", "metadata": {"a": "b"}, "modalities": ["text"], "presence_penalty": 0, "stop": None}
        for body in (settings, without, {"a_new_field": 1}, {"another": {}, "third": True}):
            assert (await send(task, "/v1/chat/completions", {**CHAT, **body}))[0] == 200
        more = {"min_p": 0.1, "thinking": {"type": "enabled", "budget_tokens": 1024}, "top_k": 3}
        choice = {"tools": [OWN_TOOL], "tool_choice": {"type": "auto"}}
        assert (await send(task, "/v1/messages", {**ANTHROPIC, **more, **choice}))[0] == 200
        assert (await send(task, "/v1/responses", {**RESPONSES, "reasoning": {"effort": "low"}, "include": ["x"]}))[
            0
        ] == 200

    counts = world.play(agent, 2000).counts
    names = {name.removeprefix("agent/ignored/"): value for name, value in counts.items() if "/ignored/" in name}
    assert names == {
        "temperature": 1,
        "top_p": 1,
        "seed": 1,
        "unknown_field": 2,
        "min_p": 1,
        "thinking": 1,
        "top_k": 1,
        "reasoning": 1,
    }
    assert counts["agent/ignored_settings"] == sum(names.values())


def test_models_have_their_length_and_errors_the_form_of_their_client(world: World) -> None:
    world.script = {"assistant\n": "x"}

    async def agent(task: AgentTask) -> None:
        status, body = await send(task, "/v1/models")
        assert status == 200 and body["data"][0]["max_model_len"] == 2000 and body["data"][0]["id"] == "policy"
        assert (await send(task, "/v1/models/policy"))[1] == body["data"][0]
        wrong = {"x-api-key": "sk-x", "anthropic-version": "2023-06-01"}
        for path, request in (("/v1/messages", ANTHROPIC), ("/v1/models", None), ("/v1/nothing", ANTHROPIC)):
            status, body = await send(task, path, request, wrong)
            assert status == (404 if "nothing" in path else 401) and body["type"] == "error", path
            assert body["error"]["type"] == ("not_found_error" if "nothing" in path else "authentication_error")
        for _ in range(2 * 10):
            assert (await send(task, "/v1/messages/count_tokens", ANTHROPIC))[0] == 200
        status, body = await send(task, "/v1/messages/count_tokens", ANTHROPIC)
        assert status == 429 and body["error"]["type"] == "rate_limit_error"
        assert (await send(task, "/v1/chat/completions", CHAT))[0] == 200

    assert world.play(agent, 2000, max_calls=2).counts["agent/calls"] == 1


def test_items_by_id_stand_for_themselves_and_unknown_ones_are_refused(world: World) -> None:
    errors: list[Any] = []

    async def agent(task: AgentTask) -> None:
        question = {"role": "user", "content": "1+2"}
        _, first = await send(task, "/v1/responses", {"input": [question], "tools": [FLAT_TOOL]})
        # Thoughts and call, as the AI SDK names them.
        items: list[Any] = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        assert [item["id"][:3] for item in items] == ["rs_", "fc_"]
        output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "3"}
        body = {"input": [question, *items, output], "tools": [FLAT_TOOL]}
        errors.append(await send(task, "/v1/responses", {**body, "input": [question, {"id": "msg_0"}]}))
        status, _ = await send(task, "/v1/responses", body)
        assert status == 200

    play(world, agent, [f"{THOUGHT}{CALL}", f"{THOUGHT}It is 3."])
    ((status, error),) = errors
    assert status == 400 and "'item_reference' to 'msg_0'" in error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_give_the_log_probabilities_that_are_asked_for(world: World, stream: bool) -> None:
    world.script = {"assistant\n": "ok"}
    answers: list[Any] = []

    async def agent(task: AgentTask) -> None:
        include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
        answers.append(await send(task, "/v1/responses", {"input": "a", "include": include, "stream": stream}))
        answers.append(await send(task, "/v1/responses", {"input": "b", "include": include[:1]}))

    result = world.play(agent, 2000)
    (_, asked), (_, other) = answers
    body = asked[-1]["response"] if stream else asked
    entries = body["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in entries] == ["o", "k", "<|im_end|>"]
    assert all(each["logprob"] <= 0 for each in entries) and other["output"][0]["content"][0]["logprobs"] == []
    assert result.counts["agent/ignored_settings"] == 0
    if stream:
        (done,) = [event for event in asked if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == entries
