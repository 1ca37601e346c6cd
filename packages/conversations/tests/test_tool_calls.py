"""Which tool calls a response makes: none of a thought, and all others, whatever their strings contain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_dppo_conversations.formats import FORMATS


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def split_tool_calls(text: str, *, starts_in_thought: bool = False) -> tuple[str, Any]:
    parsed = FORMATS["hermes"].parse(text, [{"function": {"name": "add"}}], starts_in_thought=starts_in_thought)
    return parsed.text, parsed.tool_calls


ADD = call("add", a=2)
ERASE = call("erase")
MADE = [("add", {"a": 2})]
TAGS = "</tool_call> <tool_call> <think> </think> {"
CASES: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    (ADD, MADE),
    (f"plain\n{ADD}", MADE),
    (f"{ADD}{ADD}", MADE * 2),
    (f"<think>I may try {ERASE} first; no</think>\n{ADD}", MADE),
    (f"<think>One could {ERASE} but that is wrong</think>\nThe answer is 3.", []),
    (f"<think>Now I write a <tool_call> block.</think>\n{ADD}", MADE),
    (f"<think>Now I write </tool_call>.</think>\n{ADD}", MADE),
    (f"the prompt opened this thought {ERASE}</think>{ADD}", MADE),
    (f"<think>a</think>{ERASE} no, once more:</think>{ADD}", MADE),
    (f"<think>never closed {ERASE}", []),
    (f"<think>a</think>{ADD}<think>then {ERASE}</think>", MADE),
    (f"<think>a</think>{ADD}<think>then {ERASE}", MADE),
    (f"I write a <tool_call> block now: {ADD}", MADE),
    (f"<tool_call> is the tag. {ADD} and </tool_call> ends it", MADE),
    (call("write", text=TAGS), [("write", {"text": TAGS})]),
    (f"<think>{ERASE}</think>{call('write', text=TAGS)}{ADD}", [("write", {"text": TAGS}), *MADE]),
    (call("write", text='"}</tool_call>\\'), [("write", {"text": '"}</tool_call>\\'})]),
    (call("f", x={"y": [{"z": "</think>"}]}), [("f", {"x": {"y": [{"z": "</think>"}]}})]),
    ('<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    (f"{ADD}<tool_call>", []),
    (f'{ADD}<tool_call>{{"name": "add"', []),
    (f'{ADD}<tool_call>{{"name": "add"}} 1</tool_call>', []),
    (f'{ADD}<tool_call>{{"name": 1}}</tool_call>', []),
    (f'{ADD}<tool_call>{{"name": "f", "arguments": [1]}}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', []),
    (f'<think>bad <tool_call>{{"name": </tool_call></think>{ADD}', MADE),
    (f'bad <tool_call>{{"name": </tool_call></think>{ADD}', MADE),
    ("<tool_call>" * 2000, []),
    ("<tool_call>" + "{" * 5000, []),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
def test_calls_outside_thoughts_are_made(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    content, calls = split_tool_calls(text)
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls] == expected
    # The policy writes no ids in this form. The episode gives the program some, see ``call_ids``.
    assert all(each["id"] == "" for each in calls)
    if not expected:
        assert content == text


def test_the_content_is_the_text_before_the_first_call_that_is_made() -> None:
    assert split_tool_calls(f"<think>{ERASE}</think>\nso: {ADD} end")[0] == f"<think>{ERASE}</think>\nso:"


def test_a_thought_that_the_prompt_has_opened_makes_no_calls_before_it_ends() -> None:
    assert split_tool_calls(f"try {ERASE}", starts_in_thought=True) == (f"try {ERASE}", ())
    made = split_tool_calls(f"try {ERASE}</think>{ADD}", starts_in_thought=True)[1]
    assert [each["function"]["name"] for each in made] == ["add"]
