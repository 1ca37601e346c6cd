"""Forced tool calls: the beginning of the call is given, and the policy samples the rest."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo_agents.runner import AgentTask
from test_agent_protocols import send
from tests.unit.scripted import TEMPLATE, TOOLS, World

ASK = "<|im_start|>assistant\n"
MANY = [*TOOLS, {"type": "function", "function": {"name": "add_all", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "1+2"}
CHAT = ("/v1/chat/completions", {"messages": [USER]})
IS_ASSISTANT = "{% if m.role == 'assistant' and"
EMPTY_THOUGHT = f"{IS_ASSISTANT} loop.last and not m.content %}}<think>\n\n</think>\n\n"
THINKING = TEMPLATE.replace(IS_ASSISTANT, EMPTY_THOUGHT + IS_ASSISTANT.replace("{% if", "{% elif"))
THINKING = THINKING.replace(f"{ASK}{{% endif %}}", f"{ASK}<think>\n{{% endif %}}")
XML = TEMPLATE.replace("{{ call.function | tojson }}", "<function={{ call.function.name }}></function>")
BY_ID = TEMPLATE.replace("{{ call.function | tojson }}", "{{ call.id }}")


def flat(tools: Any) -> Any:
    return [{"type": "function", "name": each["function"]["name"], "parameters": {}} for each in tools]


def own(tools: Any) -> Any:
    return [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in tools]


REST = '", "arguments": {"a": 1}}</tool_call>'
NAMED = '<tool_call>{"name": "add'
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "required": (*CHAT[:1], {**CHAT[1], "tools": TOOLS, "tool_choice": "required"}, NAMED, REST),
    "required of two": (
        *CHAT[:1],
        {**CHAT[1], "tools": MANY, "tool_choice": "required"},
        '<tool_call>{"name": "',
        f"add{REST}",
    ),
    "a name that begins another": (
        *CHAT[:1],
        {**CHAT[1], "tools": MANY, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        f'{NAMED}"',
        REST[1:],
    ),
    "responses": (
        "/v1/responses",
        {"input": "1+2", "tools": flat(MANY), "tool_choice": {"type": "function", "name": "add_all"}},
        f"{NAMED}_all",
        REST,
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 200, "model": "m", **CHAT[1], "tools": own(TOOLS), "tool_choice": {"type": "any"}},
        NAMED,
        REST,
    ),
    "messages by name": (
        "/v1/messages",
        {
            **{"max_tokens": 200, "model": "m", **CHAT[1], "tools": own(MANY)},
            "tool_choice": {"type": "tool", "name": "add_all"},
        },
        f"{NAMED}_all",
        REST,
    ),
    "a stop string of the beginning": (
        *CHAT[:1],
        {**CHAT[1], "tools": TOOLS, "tool_choice": "required", "stop": ["name", "never"]},
        NAMED,
        REST,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_beginning_of_the_call_is_given_and_the_rest_is_trained(world: World, case: str) -> None:
    path, body, opening, rest = CASES[case]
    world.script = {f"3{ASK}": "It is 3", f"tool_response><|im_end|>\n{ASK}": "It is 3", f"{ASK}{opening}": rest}
    bodies: list[Any] = []

    async def agent(task: AgentTask) -> None:
        bodies.append(await send(task, path, body))
        if path == CHAT[0]:
            said = bodies[0][1]["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
            more = {**body, "messages": [USER, said, result], "tool_choice": "auto"}
            bodies.append(await send(task, path, more))

    result = world.play(agent, 2000)
    status, answer = bodies[0]
    assert status == 200, answer
    name = "add_all" if opening.endswith("all") else "add"
    if path == CHAT[0]:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": name, "arguments": '{"a": 1}'}
        assert answer["choices"][0]["message"]["content"] is None
        assert answer["usage"]["completion_tokens"] == len(rest) + 1
        assert bodies[1][1]["choices"][0]["message"]["content"] == "It is 3"
        assert world.trained(result) == [f"{rest}<|im_end|>", "It is 3<|im_end|>"]
    else:
        (item,) = answer["output"] if path == "/v1/responses" else answer["content"]
        assert item["name"] == name and item["type"] in ("function_call", "tool_use")
        assert world.trained(result) == [f"{rest}<|im_end|>"]
    assert f"{ASK}{opening}{rest}<|im_end|>" in world.text(result)
    assert result.text.startswith(f"{opening}{rest}") and result.counts["agent/sequences"] == 1
    assert result.counts["agent/ignored_settings"] == result.counts["agent/malformed_calls"] == 0


def test_templates_decide_how_a_call_begins(world: World) -> None:
    """One that opens the thought, one with Qwen3.5's tags, and one that writes the id of a call instead of its name."""
    forced = {**CHAT[1], "tools": TOOLS, "tool_choice": "required"}
    answers: list[Any] = []

    async def agent(task: AgentTask) -> None:
        answers.append(await send(task, CHAT[0], forced))
        await send(task, CHAT[0], CHAT[1])

    for template, opening, rest in (
        (THINKING, f"<think>\n\n</think>\n\n{NAMED}", REST),
        (XML, "<tool_call><function=add", "><parameter=a>1</parameter></function></tool_call>"),
    ):
        world.tokenizer.chat_template = template
        world.script = {f"{ASK}{opening}": rest}
        result = world.play(agent, 2000)
        status, body = answers[-1]
        assert status == 200, body
        message = body["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "add" and not message.get("reasoning_content")
        assert world.trained(result.segments[0]) == [f"{rest}<|im_end|>"]
    world.tokenizer.chat_template = BY_ID
    world.play(agent, 2000)
    status, body = answers[-1]
    assert status == 400 and "does not write a call directly behind its generation prompt" in body["error"]["message"]


def test_choices_that_do_not_exist_are_refused_by_name(world: World) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": []}
    wrong: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {**CHAT[1], "tools": TOOLS, "tool_choice": choice})
        for choice in (
            *("always", 7, allowed, {"type": "function"}),
            *({"type": "function", "function": function} for function in ({"name": "none"}, {"name": ""}, {})),
        )
    ]
    wrong += [("/v1/chat/completions", {**CHAT[1], "tool_choice": "required"})]
    wrong += [
        ("/v1/responses", {"input": "q", "tools": flat(TOOLS), "tool_choice": choice})
        for choice in ("always", {"type": "web_search"}, {"type": "function", "name": "none"}, {"type": "function"})
    ]
    base = {"max_tokens": 9, "model": "m", **CHAT[1]}
    wrong += [("/v1/messages", {**base, "tools": own(TOOLS), "tool_choice": {"type": "tool", "name": "none"}})]
    wrong += [("/v1/messages", {**base, "tools": own(TOOLS), "tool_choice": {"type": "tool"}})]
    wrong += [("/v1/messages", {**base, "tool_choice": {"type": "any"}})]

    async def agent(task: AgentTask) -> None:
        for path, body in wrong:
            status, answer = await send(task, path, body)
            assert status == 400 and answer["error"]["message"].startswith("'tool_choice' = "), (body, answer)
        assert (await send(task, CHAT[0], CHAT[1]))[0] == 200

    result = world.play(agent, 2000)
    assert result.counts["agent/rejected_calls"] == len(wrong)
