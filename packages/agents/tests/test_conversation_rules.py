"""Rules of conversations: each holds in data rows and in every API of agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
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
from megatron_dppo_conversations.rules import read_row_calls, read_row_tools
from tests.unit.scripted import chat_tokenizer

NOW = datetime(2026, 1, 2)
STRICT = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{%- for m in messages %}{%- if m.role in ('system', 'developer') and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}"
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
    return made.decode(template.opening(call.messages, call.tools))


def chat(made: Any, body: dict[str, Any], _: Path) -> str:
    return rendered(made, read_chat(body))


def responses(made: Any, body: dict[str, Any], _: Path) -> str:
    """Send the messages of a chat as items."""
    items: list[dict[str, Any]] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            output = message["content"]
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
            continue
        if message["content"] is not None:
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            named = {"name": call["function"]["name"], "arguments": text}
            items.append({"type": "function_call", "call_id": call["id"], **named})
    tools = [{**tool, **tool.pop("function", {})} for tool in json.loads(json.dumps(body.get("tools", [])))]
    fields = {name: value for name, value in body.items() if name != "messages"}
    return rendered(made, read_responses({**fields, "input": items, "tools": tools}, StoredResponses()))


def messages(made: Any, body: dict[str, Any], _: Path) -> str:
    """Send the messages of a chat as blocks."""
    sent: list[dict[str, Any]] = []
    for message in body["messages"]:
        role = "system" if message["role"] == "developer" else message["role"]
        blocks = [{"type": "text", "text": message["content"]}] if message["content"] is not None else []
        if role == "tool":
            role = "user"
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
        sent.append({"role": role, "content": blocks})
    tools = []
    for tool in json.loads(json.dumps(body.get("tools", []))):
        kind = {} if tool.get("type") == "function" else {"type": tool.get("type")}
        tools.append({**kind, **tool.get("function", {})})
    fields = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    return rendered(made, read_messages({"max_tokens": 9, **fields, "messages": sent, "tools": tools}))


APIS: dict[str, Entry] = {"chat": chat, "responses": responses, "messages": messages}
ENTRIES: dict[str, Entry] = {"rows": row, **APIS}
TOOL = {"type": "function", "function": {"name": "add_two", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "S"}
DEVELOPER = {"role": "developer", "content": "D"}


def called(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [USER, answer, {"role": "tool", "tool_call_id": "c", "content": "5"}]


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> Entry:
    return ENTRIES[request.param]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Entry:
    return APIS[request.param]


@pytest.mark.parametrize("template", [STRICT, SILENT])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([SYSTEM, USER], "<system>S<user>q<assistant>"),
        ([SYSTEM, DEVELOPER, USER], "<system>S\n\nD<user>q<assistant>"),
        ([SYSTEM, SYSTEM, DEVELOPER, USER], "<system>S\n\nS\n\nD<user>q<assistant>"),
        ([USER, DEVELOPER], "<user>q\n\nD<assistant>"),
        ([SYSTEM, USER, SYSTEM, USER], "<system>S<user>q\n\nS<user>q<assistant>"),
        ([*called({}), SYSTEM], "<user>q<assistant><tool>5<user>S<assistant>"),
    ],
)
def test_system_messages_are_joined_or_folded_where_the_template_refuses_them(
    entry: Entry, tmp_path: Path, template: str, sent: list[Any], expected: str
) -> None:
    assert entry(tokenizer(template), {"messages": sent}, tmp_path) == expected


def test_a_template_that_takes_later_system_messages_gets_them(tmp_path: Path) -> None:
    free = STRICT.replace("and not loop.first", "and false")
    for name in ("rows", "chat", "responses"):
        assert ENTRIES[name](tokenizer(free), {"messages": [USER, SYSTEM]}, tmp_path) == "<user>q<system>S<assistant>"


@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
@pytest.mark.parametrize("content", [None, "", "so"])
def test_arguments_are_objects_and_content_beside_calls_may_be_null(
    entry: Entry, tmp_path: Path, arguments: Any, content: str | None
) -> None:
    text = entry(tokenizer(), {"messages": called(arguments, content)}, tmp_path)
    assert text == f"<user>q<assistant>{content or ''}[a=2]<tool>5<assistant>"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "mcp", "server_url": "x"},
        {"type": "custom", "custom": {"name": "x"}},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": 5}},
        {"type": "function", "function": {"name": "x", "parameters": "none"}},
        {"type": ["function"], "function": {"name": "x"}},
    ],
)
def test_hosted_custom_and_nameless_tools_are_refused(entry: Entry, tmp_path: Path, tool: dict[str, Any]) -> None:
    # Anthropic's type of a program's own tools.
    if entry is messages and tool["type"] == "custom":
        tool = {"type": "text_editor_20250728", "function": {"name": "x"}}
    with pytest.raises((CallError, DataError), match="tools"):
        entry(tokenizer(), {"messages": [USER], "tools": [tool]}, tmp_path)


def test_tools_reach_the_prompt_or_are_refused(entry: Entry, tmp_path: Path) -> None:
    assert "add_two" in entry(tokenizer(), {"messages": [USER], "tools": [TOOL]}, tmp_path)
    # A call with the tool's name in the conversation does not print the tool.
    named = json.loads(json.dumps(called({}, "add_two")).replace('"f"', '"add_two"'))
    for sent in ([USER], named):
        with pytest.raises((CallError, DataError), match=r"'tools'.*template"):
            entry(tokenizer(NO_TOOLS), {"messages": sent, "tools": [TOOL]}, tmp_path)


def test_a_mistake_of_the_template_is_not_blamed_on_the_messages(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises((CallError, DataError), match="syntax error") as raised:
        entry(tokenizer(SYNTAX_ERROR), {"messages": [USER]}, tmp_path)
    assert "roles" not in str(raised.value)
    with pytest.raises((CallError, DataError), match="on the messages: UndefinedError") as raised:
        entry(tokenizer("{{ messages[0].missing.field }}"), {"messages": [USER]}, tmp_path)
    with pytest.raises((CallError, DataError), match="Change their roles"):
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
    with pytest.raises(DataError, match="tool calls"):
        row(tokenizer(), {"messages": called({})[:2]}, tmp_path)


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
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

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
    read = read_row_calls(calls, "calls", (), is_columnar=False)
    expected = {"a": 1} if is_filled else {"a": 1, "b": None}
    assert [call["function"]["arguments"] for call in read] == [expected] * len(names)


def test_a_required_argument_without_a_schema_is_read() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}, "required": ["a", "b"]}}
    calls = [{"function": {"name": "f", "arguments": {"a": "x", "b": None}}}]
    (read,) = read_row_calls(calls, "calls", (tool,), is_columnar=True)
    assert read["function"]["arguments"] == {"a": "x"}
