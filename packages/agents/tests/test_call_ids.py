"""Ids of tool calls that the policy writes itself, against a conversation that is written out by hand.

The policy repeats ids, as Kimi's may. The program gets one id for each call; the tokens keep what the policy wrote.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

from megatron_dppo_agents.runner import AgentTask
from megatron_dppo_conversations.rules import order_tool_results
from test_agents import chat, post, user
from tests.unit.scripted import CALL, TEMPLATE, TOOLS, World

# It writes all tools but ``add``, so that the conversations below begin with their first message.
KIMI = """{%- for tool in tools or [] if tool.function.name != 'add' %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASK = "<|im_start|>assistant\n"
END = "<|im_end|>"


def calls_text(*calls: tuple[str, int]) -> str:
    """A response with calls of the ids, each with a number as its argument."""
    parts = [f'<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{"a": {a}}}<|tool_call_end|>' for name, a in calls]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def result_text(call_id: str, content: object) -> str:
    return f"<|im_start|>tool\n## Return of {call_id}\n{content}{END}\n"


@pytest.fixture
def kimi(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(world.tokenizer, "chat_template", KIMI)
    return world


def numbers(message: Any) -> dict[str, int]:
    """Argument of each call, by id."""
    return {call["id"]: json.loads(call["function"]["arguments"])["a"] for call in message["tool_calls"]}


def result(call_id: str, content: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": str(content)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sends", ["ids", "other ids", "no ids"])
def test_repeated_ids_stay_those_of_the_policy_in_one_sequence(kimi: World, seed: int, sends: str) -> None:
    """Random turns with one to three calls. The program keeps its results by id for the whole episode."""
    rng = random.Random(seed)
    made = iter(range(100, 200))
    turns = [
        [(f"functions.add:{rng.randint(0, 1)}", next(made)) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(2, 3))
    ]
    # The last result of each turn brings the next one.
    ends = ["go", *(str(turn[-1][1]) for turn in turns)]
    answers = [*(calls_text(*turn) for turn in turns), "done"]
    kimi.script = {f"{end}{END}\n{ASK}": answer for end, answer in zip(ends, answers, strict=True)}
    store: dict[str, int] = {}

    async def agent(task: AgentTask) -> None:
        messages: list[Any] = [user("go")]
        for _ in turns:
            said = await chat(task, messages, tools=TOOLS)
            store.update(numbers(said))
            # What a program does that knows no more of a call than its id.
            results = [result(call["id"], store[call["id"]]) for call in said["tool_calls"]]
            if sends == "other ids":
                names = {call["id"]: f"mine_{len(messages)}_{n}" for n, call in enumerate(said["tool_calls"])}
                said["tool_calls"] = [{**call, "id": names[call["id"]]} for call in said["tool_calls"]]
                results = [{**each, "tool_call_id": names[each["tool_call_id"]]} for each in results]
            if sends == "no ids":
                results = [{"role": "tool", "content": each["content"]} for each in results]
            else:
                rng.shuffle(results)
            messages += [said, *results]
        await chat(task, messages, tools=TOOLS)

    episode = kimi.play(agent, 4000)
    assert len(store) == sum(map(len, turns)), "an id for each call of the episode"
    assert kimi.trained(episode) == [f"{answer}{END}" for answer in answers]
    written = f"<|im_start|>user\ngo{END}\n"
    for answer, turn in zip(answers, [*turns, []], strict=True):
        written += f"{ASK}{answer}{END}" + ("\n" if turn else "")
        written += "".join(result_text(call_id, content) for call_id, content in turn)
    assert kimi.text(episode) == written and episode.counts["agent/sequences"] == 1


def test_a_new_segment_has_the_ids_that_the_policy_wrote(kimi: World) -> None:
    """Two workers at the same time make a call of the same id. A third segment begins with both of their histories."""
    first = calls_text(("functions.add:0", 1))
    kimi.script = {f"one{END}\n{ASK}": first, f"two{END}\n{ASK}": first, f"7{END}\n{ASK}": "7", f"8{END}\n{ASK}": "8"}

    async def agent(task: AgentTask) -> None:
        said = await asyncio.gather(*(chat(task, [user(name)], tools=TOOLS) for name in ("one", "two")))
        ids = [each["tool_calls"][0]["id"] for each in said]
        assert len(set(ids)) == 2 and "functions.add:0" in ids
        await asyncio.sleep(0.05)
        for name, message, call_id in zip(("one", "two"), said, ids, strict=True):
            await chat(task, [user(name), message, result(call_id, 7)], tools=TOOLS)
        history = [user("both"), said[0], result(ids[0], 5), said[1], result(ids[1], 8)]
        status, counted = await post(task, "/messages/count_tokens", anthropic(history))
        assert status == 200
        await chat(task, history)
        sizes.append(counted["input_tokens"])

    sizes: list[int] = []
    episode = kimi.play(agent, 4000)
    segments = [kimi.tokenizer.decode(each.token_ids.tolist()) for each in episode.segments]
    both = "".join(f"{ASK}{first}{END}\n{result_text('functions.add:0', each)}" for each in (5, 8))
    opening = f"<|im_start|>user\nboth{END}\n{both}{ASK}"
    assert segments[2] == f"{opening}8{END}" and sizes == [len(kimi.encode(opening))]
    for name, segment in zip(("one", "two"), segments[:2], strict=True):
        start = f"<|im_start|>user\n{name}{END}\n{ASK}{first}{END}\n"
        assert segment == f"{start}{result_text('functions.add:0', 7)}{ASK}7{END}"
    # Each worker waited for its tool, at its own response.
    assert [len(each.tool_times) for each in episode.segments] == [1, 1, 0]
    assert episode.counts["agent/tool_seconds"] >= 0.05


def anthropic(messages: Any) -> dict[str, Any]:
    """The messages in the form of Anthropic's API, without tools."""
    made = []
    for each in messages:
        if each["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": each["tool_call_id"], "content": each["content"]}
            made.append({"role": "user", "content": [block]})
        elif each["role"] == "assistant":
            calls = numbers(each).items()
            blocks = [{"type": "tool_use", "id": name, "name": "add", "input": {"a": a}} for name, a in calls]
            made.append({"role": "assistant", "content": blocks})
        else:
            made.append(each)
    return {"model": "m", "max_tokens": 10, "messages": made}


def test_an_id_that_the_program_has_used_itself_is_not_given_again(kimi: World) -> None:
    """Examples in the prompt have ids, too."""
    shown = calls_text(("functions.add:0", 1))
    kimi.script = {f"go{END}\n{ASK}": shown}
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    example = [user("like this"), {"role": "assistant", "content": "", "tool_calls": [call]}, result(call["id"], 1)]

    async def agent(task: AgentTask) -> None:
        said = await chat(task, [*example, user("go")], tools=TOOLS)
        assert said["tool_calls"][0]["id"] != "functions.add:0"

    assert kimi.trained(kimi.play(agent, 2000)) == [f"{shown}{END}"]


def test_a_template_that_writes_ids_gets_the_same_ones_in_each_run_of_an_episode(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a carried episode, whose calls are compared by their tokens, continues. The program's ids differ."""
    template = TEMPLATE.replace("<tool_response>", "<tool_response>{{ m.tool_call_id }}=")
    monkeypatch.setattr(world.tokenizer, "chat_template", template)
    world.script = {f"go{END}\n{ASK}": CALL * 2, f"4</tool_response>{END}\n{ASK}": "done"}
    given: list[str] = []

    async def agent(task: AgentTask) -> None:
        said = await chat(task, [user("go")], tools=TOOLS)
        ids = [call["id"] for call in said["tool_calls"]]
        given.extend(ids)
        await chat(task, [user("go"), said, result(ids[1], 4), result(ids[0], 3)], tools=TOOLS)

    texts = [world.text(world.play(agent, 2000)) for _ in range(2)]
    assert texts[0] == texts[1] and len(set(given)) == 4
    written = re.findall("<tool_response>(.*)=(.)</tool_response>", texts[0])
    assert [content for _, content in written] == ["3", "4"]
    assert len(dict(written)) == 2 and all(len(name) == 9 and name.isalnum() for name, _ in written)


def test_results_without_ids_belong_to_the_calls_without_a_result() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": {}}} for name in "xyz"]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    bare = [{"role": "tool", "content": text} for text in ("first", "second", "third")]
    ordered = order_tool_results([said, bare[0], result("x", "x"), bare[1], bare[2]])
    assert ordered == [said, bare[2], result("x", "x"), result("y", "first"), result("z", "second")]
