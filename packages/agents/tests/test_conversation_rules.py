"""Rules of conversations: each holds in data rows and in every API of agents. ``RULES`` has a cell for each of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.data.chat import ChatOptions
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.errors import DataError
from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_agents.completions_api import read_chat
from megatron_dppo_agents.messages_api import read_messages
from megatron_dppo_agents.protocol_record import StoredResponses
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_agents.responses_api import read_responses
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.formats import FORMATS
from megatron_dppo_conversations.messages import read_row_messages, read_row_tools
from megatron_dppo_conversations.rules import ConversationError, order_tool_results
from tests.unit.scripted import chat_tokenizer

NOW = datetime(2026, 1, 2)
STRICT = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '<' + m.role + '>' }}{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}[{{ k }}={{ v }}]{% endfor %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Qwen3.5's: one system message, the first, and arguments that are objects."""
SILENT = STRICT.replace("{{ raise_exception('System message must be at the beginning.') }}", "{% continue %}")
"""Leaves later system messages out without a word."""
NO_TOOLS = STRICT.replace("{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}", "")
SYNTAX_ERROR = STRICT + "{% if %}"
Entry = Callable[[Any, dict[str, Any], Path], str]


def tokenizer(template: str = STRICT) -> Any:
    made = chat_tokenizer()
    made.chat_template = template
    return made


def row(made: Any, body: dict[str, Any], folder: Path) -> str:
    """Return the prompt of a row with the messages of a request."""
    file = folder / "rows.jsonl"
    named = {"prompt" if name == "messages" else name: value for name, value in body.items()}
    file.write_text(json.dumps({"label": "1", **named}))
    (read,) = iter_rows(str(file), "train")
    return ChatOptions(now=NOW).render(read, made)[0]


def rendered(made: Any, call: AgentRequest) -> str:
    template = ChatTemplate(made, {}, NOW)
    ResponseReader(made, FORMATS["hermes"], separates_reasoning=True).check(call)
    template.check_tools(call)
    return made.decode(template.opening(order_tool_results(call.messages), call.tools))


def verifiers(made: Any, body: dict[str, Any], folder: Path) -> str:
    """Write a row of verifiers: flat tools in ``tool_defs``, and flat calls."""
    sent = [
        {**each, "tool_calls": [{"id": call["id"], **call["function"]} for call in each["tool_calls"]]}
        if isinstance(each.get("tool_calls"), list)
        else each
        for each in body["messages"]
    ]
    tools = [{**tool, **tool.pop("function", {})} for tool in json.loads(json.dumps(body.get("tools", [])))]
    return row(made, {"messages": sent, "tool_defs": json.dumps(tools)}, folder)


def chat(made: Any, body: dict[str, Any], _: Path) -> str:
    return rendered(made, read_chat(body))


def responses(made: Any, body: dict[str, Any], _: Path) -> str:
    """Send the messages of a chat as items."""
    items: list[dict[str, Any]] = []
    for message in body["messages"]:
        content = message.get("content")
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if thoughts := next((message[name] for name in THOUGHTS if name in message), None):
            items.append(
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]}
            )
        if content is not None or not (calls or thoughts):
            items.append({"role": message["role"], "content": content})
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    tools = [{**tool, **tool.pop("function", {})} for tool in json.loads(json.dumps(body.get("tools", [])))]
    fields = {name: value for name, value in body.items() if name != "messages"}
    return rendered(made, read_responses({**fields, "input": items, "tools": tools}, StoredResponses()))


def messages(made: Any, body: dict[str, Any], _: Path) -> str:
    """Send the messages of a chat as blocks."""
    sent: list[dict[str, Any]] = []
    for message in body["messages"]:
        role = "system" if message["role"] == "developer" else message["role"]
        content = message.get("content")
        calls = message.get("tool_calls", ())
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "tool":
            role = "user"
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        if thoughts := next((message[name] for name in THOUGHTS if name in message), None):
            blocks = [{"type": "thinking", "thinking": thoughts, "signature": ""}, *(blocks or [])]
        for call in calls:
            function = {"input" if name == "arguments" else name: value for name, value in call["function"].items()}
            blocks = [*(blocks or []), {"type": "tool_use", "id": call["id"], **function}]
        sent.append({"role": role, "content": blocks})
    tools = []
    for tool in json.loads(json.dumps(body.get("tools", []))):
        kind = {} if tool.get("type") == "function" else {"type": tool.get("type")}
        tools.append({**kind, **tool.get("function", {})})
    fields = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    return rendered(made, read_messages({"max_tokens": 9, **fields, "messages": sent, "tools": tools}))


APIS: dict[str, Entry] = {"chat": chat, "responses": responses, "messages": messages}
ENTRIES: dict[str, Entry] = {"rows": row, "verifiers": verifiers, **APIS}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TOOL = {"type": "function", "function": {"name": "add_two", "parameters": {"type": "object"}}}
PRINTED = '{"name": "add_two", "parameters": {"type": "object"}}'
USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "S"}
DEVELOPER = {"role": "developer", "content": "D"}
ERRORS = (CallError, DataError, ConversationError)


def answer(call_id: str, content: Any = "5") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def called(content: str | None = None, *ids: str, **function: Any) -> dict[str, Any]:
    """Return an answer with calls of one function."""
    calls = [{"id": each, "type": "function", "function": {"name": "f", **function}} for each in ids or ("c",)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def call_of(**function: Any) -> dict[str, Any]:
    return {"messages": [USER, called(**function), answer("c")]}


def said(*sent: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(sent), **fields}


def tooled(**tool: Any) -> dict[str, Any]:
    return said(USER, tools=[tool])


TEXT = {"type": "text", "text": "x"}
NO_CALLS = "no calls in this form"
# Rule: what is sent, and the prompt; a pattern if it is refused in these words. A third part has the entries that have
# no such form, and why.
RULES: dict[str, tuple[Any, ...]] = {
    "a system message": (said(SYSTEM, USER), "<system>S<user>q<assistant>"),
    "a developer's message is the system's": (said(DEVELOPER, USER), "<system>D<user>q<assistant>"),
    "both are joined": (said(SYSTEM, DEVELOPER, USER), "<system>S\n\nD<user>q<assistant>"),
    "several are joined": (said(SYSTEM, SYSTEM, DEVELOPER, USER), "<system>S\n\nS\n\nD<user>q<assistant>"),
    "a later one is folded": (said(USER, DEVELOPER), "<user>q\n\nD<assistant>"),
    "one between users is folded": (said(SYSTEM, USER, SYSTEM, USER), "<system>S<user>q\n\nS<user>q<assistant>"),
    "one behind a result is a user's": (
        said(USER, called(arguments={}), answer("c"), SYSTEM),
        "<user>q<assistant><tool>5<user>S<assistant>",
    ),
    "parts of text are joined": (said({"role": "user", "content": [TEXT, TEXT]}), "<user>xx<assistant>"),
    "parts of a system message": (said({"role": "system", "content": [TEXT]}, USER), "<system>x<user>q<assistant>"),
    "parts of a result": (
        said(USER, called(arguments={}), answer("c", [TEXT, TEXT])),
        "<user>q<assistant><tool>xx<assistant>",
    ),
    "an image": (
        said({"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}),
        re.compile("image_url"),
    ),
    "an audio": (said({"role": "user", "content": [{"type": "input_audio"}]}), re.compile("input_audio")),
    "a text without its text": (said({"role": "user", "content": [{"type": "text"}]}), re.compile("no text")),
    "a part that is a string": (said({"role": "user", "content": ["x"]}), re.compile("'str'|blocks")),
    "content is an object": (said({"role": "user", "content": {"text": "x"}}), re.compile("content")),
    "null content": (said({"role": "user", "content": None}), re.compile("content None|content = None")),
    "null content of an answer": (
        said(USER, {"role": "assistant", "content": None}, USER),
        re.compile("content None|content = None"),
    ),
    "null content beside a call": (call_of(arguments={"a": 2}), "<user>q<assistant>[a=2]<tool>5<assistant>"),
    "text beside a call": (
        said(USER, called("so", arguments={"a": 2}), answer("c")),
        "<user>q<assistant>so[a=2]<tool>5<assistant>",
    ),
    "arguments as text": (call_of(arguments='{"a": 2}'), "<user>q<assistant>[a=2]<tool>5<assistant>"),
    "arguments as an empty text": (call_of(arguments=""), "<user>q<assistant><tool>5<assistant>"),
    "null arguments": (call_of(arguments=None), "<user>q<assistant><tool>5<assistant>"),
    "no arguments": (call_of(), "<user>q<assistant><tool>5<assistant>"),
    "arguments by another name": (call_of(parameters={"a": 2}), "<user>q<assistant>[a=2]<tool>5<assistant>"),
    "arguments by an unknown name": (call_of(args={"a": 2}), re.compile("without 'arguments'")),
    "arguments are a list": (call_of(arguments=[1]), re.compile("without 'arguments'")),
    "arguments are a list as text": (call_of(arguments="[1]"), re.compile("without 'arguments'")),
    "arguments are no JSON": (call_of(arguments="{a: 2}"), re.compile("no JSON")),
    "a call without a name": (call_of(name=None, arguments={}), re.compile("without a function's name")),
    "a call with an empty name": (call_of(name="", arguments={}), re.compile("without a function's name")),
    "calls of a user": (
        said({**called("q", arguments={}), "role": "user"}, answer("c"), USER),
        re.compile("assistant"),
        ("responses", "messages"),
        "each call is the assistant's there, or has a type that a user's message has not",
    ),
    "a legacy call": (
        said(USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, USER),
        re.compile("function_call"),
        ("responses", "messages"),
        NO_CALLS,
    ),
    "results in another order": (
        said(USER, called(None, "c", "d", arguments={}), answer("d", "2"), answer("c", "1")),
        "<user>q<assistant><tool>1<tool>2<assistant>",
    ),
    "a result of an unknown call": (said(USER, called(arguments={}), answer("x")), re.compile("'x' is no call")),
    "two results of a call": (
        said(USER, called(arguments={}), answer("c"), answer("c")),
        re.compile("has a result already"),
    ),
    "one id for two calls": (said(USER, called(None, "c", "c", arguments={}), answer("c")), re.compile("one id twice")),
    "calls without results": (
        said(USER, called(arguments={})),
        re.compile("tool calls, which have no|the assistant's"),
    ),
    "an unknown role": (said({"role": "critic", "content": "x"}, USER), re.compile("role 'critic'")),
    **{
        f"thoughts as {name}": (
            said(USER, {"role": "assistant", "content": "a", name: "T"}, USER),
            "<user>q<assistant>(T)a<user>q<assistant>",
        )
        for name in THOUGHTS
    },
    "thoughts and a call": (
        said(USER, {**called(arguments={"a": 2}), "reasoning_content": "T"}, answer("c")),
        "<user>q<assistant>(T)[a=2]<tool>5<assistant>",
    ),
    "thoughts alone": (
        said(USER, {"role": "assistant", "content": None, "reasoning_content": "T"}, USER),
        "<user>q<assistant>(T)<user>q<assistant>",
    ),
    "a tool": (
        tooled(**TOOL),
        f'<tools>[{{"type": "function", "function": {PRINTED}}}]</tools><user>q<assistant>',
    ),
    "a tool with settings of the API": (
        tooled(**{**TOOL, "function": {**TOOL["function"], "strict": True, "description": None}}),  # type: ignore[dict-item]
        f'<tools>[{{"type": "function", "function": {PRINTED}}}]</tools><user>q<assistant>',
    ),
    "a tool with another name of the schema": (
        tooled(type="function", function={"name": "add_two", "input_schema": {"type": "object"}}),
        f'<tools>[{{"type": "function", "function": {PRINTED}}}]</tools><user>q<assistant>',
    ),
    "a hosted tool": (tooled(type="web_search"), re.compile("'web_search'")),
    "a server of tools": (tooled(type="mcp", server_url="x"), re.compile("'mcp'")),
    "a custom tool": (
        tooled(type="custom", custom={"name": "x"}),
        re.compile("tool.*'custom'"),
        ("messages",),
        "Anthropic's type of a program's own tools",
    ),
    "a tool without a function": (tooled(type="function", function={}), re.compile("tool.*name")),
    "a tool with an empty name": (tooled(type="function", function={"name": ""}), re.compile("tool.*name")),
    "a tool whose name is a number": (tooled(type="function", function={"name": 5}), re.compile("tool.*name")),
    "a schema that is text": (
        tooled(type="function", function={"name": "x", "parameters": "none"}),
        re.compile("tool.*schema"),
    ),
    "a type that is a list": (tooled(type=["function"], function={"name": "x"}), re.compile("tool.*type")),
    "tools that are no list": (
        said(USER, tools={"a": 1}),
        re.compile("tools"),
        ("verifiers", "responses", "messages"),
        "the test writes a list there",
    ),
}
CELLS = [
    (rule, name) for rule, (_, _, *missing) in RULES.items() for name in ENTRIES if name not in (missing or [()])[0]
]


@pytest.mark.parametrize(("rule", "name"), CELLS)
def test_a_rule_holds_for_each_entry(rule: str, name: str, tmp_path: Path) -> None:
    sent, expected = RULES[rule][:2]
    if isinstance(expected, str):
        assert ENTRIES[name](tokenizer(), sent, tmp_path) == expected
        return
    with pytest.raises(ERRORS) as raised:
        ENTRIES[name](tokenizer(), sent, tmp_path)
    assert expected.search(str(raised.value)), raised.value


@pytest.mark.parametrize("rule", [rule for rule in RULES if "folded" in rule or "joined" in rule or "user's" in rule])
def test_system_messages_that_a_template_leaves_out_are_folded_too(entry: Entry, tmp_path: Path, rule: str) -> None:
    sent, expected = RULES[rule]
    assert entry(tokenizer(SILENT), sent, tmp_path) == expected


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> Entry:
    return ENTRIES[request.param]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Entry:
    return APIS[request.param]


@pytest.mark.parametrize("name", ["gptoss", "qwen3", "glm4moe", "qwen3_5_think", "nemotron_3_nano"])
def test_thoughts_of_a_call_reach_the_prompt_of_published_templates(entry: Entry, tmp_path: Path, name: str) -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    made = tokenizer((Path(spec.origin).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8"))
    for content in (None, "So."):
        for thoughts in THOUGHTS:
            sent = said(USER, {**called(content, arguments={"a": 2}), thoughts: "Hm, two."}, answer("c"), tools=[TOOL])
            text = entry(made, sent, tmp_path)
            assert "Hm, two." in text and (content or "") in text


def test_a_template_that_takes_later_system_messages_gets_them(entry: Entry, tmp_path: Path) -> None:
    free = STRICT.replace("and not loop.first", "and false")
    assert entry(tokenizer(free), said(USER, SYSTEM), tmp_path) == "<user>q<system>S<assistant>"


def test_tools_reach_the_prompt_or_are_refused(entry: Entry, tmp_path: Path) -> None:
    assert "add_two" in entry(tokenizer(), {"messages": [USER], "tools": [TOOL]}, tmp_path)
    # A call with the tool's name in the conversation does not print the tool.
    named = [USER, called("add_two", name="add_two", arguments={}), answer("c")]
    for sent in ([USER], named):
        with pytest.raises(ERRORS, match=r"'tool.*template"):
            entry(tokenizer(NO_TOOLS), {"messages": sent, "tools": [TOOL]}, tmp_path)


def test_a_mistake_of_the_template_is_not_blamed_on_the_messages(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(ERRORS, match="syntax error") as raised:
        entry(tokenizer(SYNTAX_ERROR), {"messages": [USER]}, tmp_path)
    assert "roles" not in str(raised.value)
    with pytest.raises(ERRORS, match="on the messages: UndefinedError") as raised:
        entry(tokenizer("{{ messages[0].missing.field }}"), {"messages": [USER]}, tmp_path)
    with pytest.raises(ERRORS, match="Change their roles"):
        entry(tokenizer("{{ raise_exception('no') }}"), {"messages": [USER]}, tmp_path)


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": {"id": "pmpt_1"}},
        {"conversation": "conv_1"},
        {"mcp_servers": [{"type": "url"}]},
        {"documents": [{"text": "x"}]},
        {"chat_template": "x"},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"functions": [{"name": "f"}]},
        {"top_logprobs": 2},
        {"background": True},
        {"guided_json": {}, "guided_regex": "a+"},
        {"structured_outputs": {"choice": ["a"]}},
    ],
    ids=str,
)
def test_fields_that_change_the_question_or_the_answer_are_refused(api: Entry, tmp_path: Path, field: Any) -> None:
    with pytest.raises(CallError, match="is not supported"):
        api(tokenizer(), {"messages": [USER], **field}, tmp_path)
    neutral = {"continue_final_message": False, "add_generation_prompt": True, "documents": [], "prompt": None}
    assert api(tokenizer(), {"messages": [USER], **neutral}, tmp_path) == "<user>q<assistant>"


def test_a_begun_answer_continues_in_rows_and_is_refused_by_apis(tmp_path: Path) -> None:
    begun = [USER, {"role": "assistant", "content": "It"}]
    assert row(tokenizer(), {"messages": begun}, tmp_path) == "<user>q<assistant>It"
    with pytest.raises(CallError, match="beginning of a response"):
        messages(tokenizer(), {"messages": begun}, tmp_path)
    for mark in ("prefix", "partial"):
        with pytest.raises(CallError, match="beginning of a response"):
            chat(tokenizer(), {"messages": [USER, {**begun[1], mark: True}]}, tmp_path)


@pytest.mark.parametrize("column", ["tools", "tool_defs"])
@pytest.mark.parametrize("form", ["list", "json", "list of json", "flat"])
def test_each_form_of_the_tools_of_a_row_reaches_the_prompt(tmp_path: Path, column: str, form: str) -> None:
    flat = {**TOOL["function"], "description": "Adds."}  # type: ignore[dict-item]
    value: Any = {"list": [TOOL], "json": json.dumps([TOOL]), "list of json": [json.dumps(TOOL)], "flat": [flat]}[form]
    assert '"name": "add_two"' in row(tokenizer(), {"messages": [USER], column: value}, tmp_path)
    # A prompt without template has its tools in its text, or nowhere.
    assert row(tokenizer(), {"prompt": "with add_two", column: value}, tmp_path) == "with add_two"
    with pytest.raises(DataError, match=f"'{column}' has tools"):
        row(tokenizer(), {"prompt": "q", column: value}, tmp_path)
    for wrong in ("[{", "search", 5, {"a": 1}, ["search"], [5]):
        with pytest.raises(DataError, match=f"field '{column}'"):
            row(tokenizer(), {"messages": [USER], column: wrong}, tmp_path)


def fillers(folder: Path, calls: list[tuple[str, Any]], tools: Any = None, *, is_parquet: bool = True) -> list[str]:
    """Return the prompts of rows with a call each."""
    records = []
    for index, (name, arguments) in enumerate(calls):
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        sent = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {**USER, "content": str(index)}]
        records.append({"prompt": sent, "label": "1"} | ({"tools": json.dumps(tools)} if tools else {}))
    file = folder / ("rows.parquet" if is_parquet else "rows.jsonl")
    if is_parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    else:
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ messages[0].content + messages[-1].content }}"
    )
    made = tokenizer(template)
    return [ChatOptions(now=NOW).render(each, made)[0] for each in iter_rows(str(file), "train")]


def test_null_fillers_leave_the_arguments_at_every_depth(tmp_path: Path) -> None:
    nested = {"where": {"a": 1, "b": [{"c": 2}, {"d": 3}]}}
    texts = fillers(tmp_path, [("f", {"a": 2, "b": 3}), ("g", {"query": "x"}), ("h", nested)])
    expected = ['{"a": 2, "b": 3}', '{"query": "x"}', '{"where": {"a": 1, "b": [{"c": 2}, {"d": 3}]}}']
    assert [text.partition("q")[0] if index != 1 else text[:14] for index, text in enumerate(texts)] == expected
    # Nulls of a list are values, and so are those of JSON that was not made from columns.
    assert "[1, null]" in fillers(tmp_path, [("f", {"a": [1, None]})])[0]
    assert '{"a": null}' in fillers(tmp_path, [("f", {"a": None})], is_parquet=False)[0]


def test_the_schema_decides_which_null_is_a_value(tmp_path: Path) -> None:
    nullable = {"type": ["string", "null"]}
    properties = {"a": nullable, "b": nullable, "c": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "c"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    union = {"a": None, "b": None, "c": None, "other": None}
    assert (
        '{"a": null}q' in fillers(tmp_path, [("f", {**union, "c": None}), ("f", dict.fromkeys(union, "x"))], tools)[0]
    )
    # JSON: only what the tool does not have.
    assert '{"a": null, "b": null, "c": null}q' in fillers(tmp_path, [("f", union)], tools, is_parquet=False)[0]


def test_the_tools_of_a_columnar_file_have_no_null_fields(tmp_path: Path) -> None:
    def tool(name: str, properties: Any) -> dict[str, Any]:
        function = {"name": name, "description": "d", "parameters": {"properties": properties}}
        return {"type": "function", "function": function}

    tools = [tool("f", {"a": {"type": "string", "enum": ["x"]}}), tool("g", {"b": {"type": "integer"}})]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": [USER], "label": "1", "tools": tools}]), file)
    (read,) = iter_rows(str(file), "train")
    assert read.tools() == tools


def test_the_tools_of_a_json_file_keep_null_where_it_is_a_value() -> None:
    properties = {"a": {"enum": ["x", None], "default": None, "title": None}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    (read,) = read_row_tools({"tools": [tool]}, is_columnar=False)
    assert read["function"]["parameters"]["properties"] == {"a": {"enum": ["x", None], "default": None}}


@pytest.mark.parametrize(("names", "is_filled"), [(("f", "g"), True), (("f", "f"), False), (("f",), False)])
def test_calls_of_several_tools_with_the_same_arguments_were_filled(names: tuple[str, ...], is_filled: bool) -> None:
    """JSON that was made from columns: each call has the arguments of all tools."""
    calls = [{"function": {"name": name, "arguments": {"a": 1, "b": None}}} for name in names]
    expected = {"a": 1} if is_filled else {"a": 1, "b": None}
    assert read_arguments(calls) == [expected] * len(names)


def read_arguments(calls: list[Any], *tools: Any, is_columnar: bool = False) -> list[Any]:
    """Return the arguments of calls of a row."""
    sent = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, USER]
    read = read_row_messages(sent, tools, is_columnar=is_columnar)
    return [call["function"]["arguments"] for call in read[1]["tool_calls"]]


def test_a_required_argument_without_a_schema_is_read() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}, "required": ["a", "b"]}}
    calls = [{"function": {"name": "f", "arguments": {"a": "x", "b": None}}}]
    assert read_arguments(calls, tool, is_columnar=True) == [{"a": "x"}]


def test_json_text_in_a_columnar_file_has_no_fillers() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": null}'}}]
    assert read_arguments(calls, is_columnar=True) == [{"a": None}]


def test_results_of_calls_without_ids_keep_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    sent = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, answer("1", "a"), answer("2", "b")]
    assert [message["content"] for message in read_row_messages(sent)] == ["q", "", "a", "b"]
