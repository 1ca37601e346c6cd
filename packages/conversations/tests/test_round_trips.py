"""Calls that the published templates of trl's wheel write are read back as they were, whatever their strings hold."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo_conversations.formats import choose_format
from megatron_dppo_conversations.rules import with_text_arguments

transformers_templates = pytest.importorskip("transformers.utils.chat_template_utils")
SPEC = find_spec("trl")
if SPEC is None or SPEC.origin is None:
    pytest.skip("needs the templates of trl's wheel", allow_module_level=True)
FOLDER = Path(SPEC.origin).parent / "chat_templates"
TEMPLATES = [
    *("gptoss", "glm4moe", "llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think"),
    *("qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super", "deepseekv3"),
]
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|observation|>")
PROPERTIES = {
    **{"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": "number"}},
    **{"b": {"type": "boolean"}, "l": {"type": "array"}, "o": {"type": "object"}, "z": {"type": ["string", "null"]}},
    **{"enum": {"enum": ["1", "2"]}, "ref": {"$ref": "#/$defs/Zip"}, "all": {"allOf": [{"$ref": "#/$defs/Zip"}]}},
    **{"const": {"const": "12"}, "optional": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Zip": {"type": "string", "enum": ["12", "true"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}}]
STRINGS = [
    *(
        "",
        "x",
        "12",
        "true",
        "null",
        "None",
        "True",
        "[1]",
        '{"a": 1}',
        '"x"',
        "-0",
        "1e5",
        "1.0",
        "\\n",
        "'",
        "{",
        "}",
    ),
    *(" lead", "trail ", "\nlead", "trail\n", "\n", "\n\na\n\n", "a\r\nb", "\t", "\x00", "\u2028", "ü 日本", "\u00a0x"),
    *(
        "<think>",
        "</think>",
        "a <think> b </think> c",
        "<tool_call>",
        "</tool_call>",
        "<b>&amp;</b>",
        "```json\n{}\n```",
    ),
    *("<parameter=s>", "</parameter>", "</parameter> and <parameter=s>", "<parameter=other>", "</function>"),
    *("<function=add>", "<arg_key>s</arg_key>", "</arg_value>", "[TOOL_CALLS]", "<|python_tag|>", "</invoke>", "; "),
    *("<|im_end|>", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "def f():\n    return 1\n"),
]
ARGUMENTS: list[dict[str, Any]] = [
    *({"s": text} for text in STRINGS),
    *({}, {"n": -3}, {"f": 1e-7}, {"f": 3}, {"b": True}, {"b": False}, {"z": None}, {"z": "x"}, {"l": []}, {"o": {}}),
    *({"l": ["a", 1, None, {"b": True}]}, {"o": {"a": {"b": [1, "</think>"]}}}, {"s": "x\n", "t": "\ny"}),
    *({"enum": "1"}, {"ref": "12"}, {"all": "true"}, {"const": "12"}, {"optional": "12"}, {"optional": None}),
    {"s": "12", "n": 12, "b": True, "l": [1, 2], "o": {"q": "r"}, "z": None},
]


def render(template: str, messages: list[Any], *, is_prompt: bool) -> str:
    texts, _ = transformers_templates.render_jinja_template(
        [messages], tools=TOOLS, chat_template=template, add_generation_prompt=is_prompt, bos_token="", eos_token=""
    )
    return str(texts[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    form = choose_format(template)
    user = {"role": "user", "content": "q"}
    # The template writes an answer without the thought that it opens in the prompt.
    prompt = re.sub(r"<think>\s*(</think>\s*)?$", "", render(template, [user], is_prompt=True))
    for arguments in ARGUMENTS:
        call = {"id": "callabcde", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages = with_text_arguments(messages) if form.needs_text_arguments else messages
        written = render(template, messages, is_prompt=False)
        assert written.startswith(prompt)
        response = written.removeprefix(prompt).rstrip("\n")
        for end in ENDS:
            response = response.removesuffix(end)
        parsed = form.parse(response, TOOLS)
        made = [(each["function"]["name"], each["function"]["arguments"]) for each in parsed.tool_calls]
        # As JSON, in which 1, 1.0 and true differ.
        assert json.dumps(made) == json.dumps([("add", arguments)]), written
        assert (parsed.content, parsed.num_malformed) == ("", 0), written


@pytest.mark.parametrize(
    "value",
    [
        *("</parameter>\n<parameter=s>\nb", "<parameter=t>", "</parameter>\n</function>"),
        *("a</parameter>\n</function>\n</tool_call>b", "</parameter></function></tool_call><tool_call>"),
    ],
)
def test_a_string_that_looks_like_the_end_of_its_call_is_counted(value: str) -> None:
    """Nothing escapes such a string, so that it cannot be told from a call that is broken."""
    template = (FOLDER / "qwen3_5_think.jinja").read_text(encoding="utf-8")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"s": value}}}
    written = render(
        template, [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}], is_prompt=False
    )
    parsed = choose_format(template).parse(written.rpartition("</think>")[2], TOOLS)
    assert (parsed.tool_calls, parsed.num_malformed) == ((), 1)
