"""Rules of conversations that data rows and every API of agents share: tools, tool calls and system messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_dppo_conversations.formats.base import ToolCall, make_tool_call
from megatron_dppo_conversations.formats.json_values import parse_json
from megatron_dppo_conversations.formats.schemas import Tools, ValueSchema, parameters_schema

Message = Mapping[str, Any]
NOTE_ROLES = ("system", "developer")
_SCHEMA_FIELDS = ("parameters", "input_schema", "inputSchema")
"""Names of a tool's JSON schema: OpenAI, Anthropic and MCP."""
_NULL_IS_A_VALUE = ("const", "default", "enum", "example", "examples")
"""Fields of a JSON schema in which null is no filler."""
TOOL_COLUMNS = ("tools", "tool_defs")
"""Columns of a row with its tools: TRL, SkyRL and NeMo; verifiers."""


class ConversationError(ValueError):
    """Messages or tools that no chat template can be given."""


def read_tool(tool: object, name: str, *, kinds: Collection[str | None] = ("function", None)) -> dict[str, object]:
    """Return a tool, with its function inside or with the function's fields, in the form of chat completions.

    All types but ``kinds`` are tools that the API's own servers run. They and nameless tools raise
    ``ConversationError``.
    """
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if not isinstance(tool, Mapping) or not isinstance(kind, str | None) or kind not in kinds:
        known = " or ".join(repr(each) for each in kinds if each is not None)
        raise ConversationError(
            f"{name} has the type {kind!r:.80}; only tools of your own are served, of the type {known}"
        )
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConversationError(f"{name} has no function with a name; expected name, description and JSON schema")
    key = next((each for each in _SCHEMA_FIELDS if function.get(each)), "parameters")
    schema = function.get(key) or {"type": "object"}
    if not isinstance(schema, Mapping):
        raise ConversationError(f"{name} has the {key} {schema!r:.80}; expected a JSON schema, which is an object")
    if function is not tool:
        return dict(tool)
    description = function.get("description") or ""
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description, "parameters": schema},
    }


def read_tool_call(call: object, name: str) -> ToolCall:
    """Return a tool call as chat templates expect it: its arguments are an object, also if they were JSON as text.

    Its function is inside, or its fields stand in the call. A malformed one raises ``ConversationError``.
    """
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function") or fields
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{name} has an entry without a function's name")
    arguments = function.get("arguments") or "{}"
    call_id = fields.get("id") or ""
    if not isinstance(arguments, str | dict) or not isinstance(call_id, str):
        raise ConversationError(f"{name}: 'id' and 'function.arguments' must be strings")
    return make_tool_call(call_id, function["name"], arguments)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls have their arguments as text, which the templates of some families need."""
    result = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        result.append({**message, "tool_calls": calls} if calls else message)
    return result


def fold_notes(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return messages with one system message, the first; later ones are a part of the user's message before them.

    Clients add notes in the middle of a conversation, where few templates accept a system message. A note without a
    user's message before it becomes one.
    """
    result: list[dict[str, Any]] = []
    for is_note, group in groupby(messages, lambda message: message["role"] in NOTE_ROLES):
        if not is_note:
            result += [dict(message) for message in group]
            continue
        texts = [message["content"] for message in group]
        role = "user" if result else "system"
        if result and result[-1]["role"] == "user":
            texts.insert(0, result.pop()["content"])
        result.append({"role": role, "content": "\n\n".join(texts)})
    return result


def read_row_tools(record: Mapping[str, object], *, is_columnar: bool) -> list[dict[str, object]]:
    """Return the tools of a data row, from a list or its JSON; empty if the row has none.

    A columnar file gives each object the fields of all, with null for those that it has not. Anything but tools raises
    ``ConversationError`` with the column.
    """
    for column in TOOL_COLUMNS:
        tools = record.get(column)
        if isinstance(tools, str) and tools.strip():
            try:
                tools = parse_json(tools)
            except ValueError as error:
                raise ConversationError(f"field {column!r} holds no tools: it is no JSON ({error})") from error
        if not tools:
            continue
        if not isinstance(tools, list):
            raise ConversationError(f"field {column!r} holds no tools: {tools!r:.80}, expected a list of objects")
        parts = [_parsed_object(tool) for tool in tools]
        cleaned = [_without_null_fields(tool, keeps=() if is_columnar else _NULL_IS_A_VALUE) for tool in parts]
        return [read_tool(tool, f"field {column!r}: entry {index}") for index, tool in enumerate(cleaned)]
    return []


def _parsed_object(tool: Any) -> Any:
    """Return a tool that is written as JSON text as an object."""
    try:
        return parse_json(tool) if isinstance(tool, str) else tool
    except ValueError:
        return tool


def _without_null_fields(value: Any, *, keeps: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        items = [(key, each) for key, each in value.items() if each is not None or key in keeps]
        return {key: each if key in keeps else _without_null_fields(each, keeps=keeps) for key, each in items}
    return [_without_null_fields(each, keeps=keeps) for each in value] if isinstance(value, list) else value


def read_row_calls(calls: Any, name: str, tools: Tools, *, is_columnar: bool) -> list[dict[str, Any]]:
    """Return the tool calls of a row's message without arguments that only fill other calls' fields.

    See ``read_row_tools`` for ``is_columnar``. A malformed call raises ``ConversationError``.
    """
    if not isinstance(calls, list):
        raise ConversationError(f"{name} = {calls!r:.80}, expected a list")
    result: list[dict[str, Any]] = []
    is_filled = is_columnar or _fill_each_other(calls)
    for each in calls:
        call = read_tool_call(each, name)
        function = call["function"]
        schema = parameters_schema(tools, function["name"])
        function["arguments"] = _without_fillers(function["arguments"], schema, is_filled=is_filled)
        result.append({key: part for key, part in call.items() if key != "id" or call["id"]})
    return result


def _fill_each_other(calls: Sequence[Any]) -> bool:
    """Return True if calls of several tools have the same arguments, as in JSON that a columnar file was written to."""
    names_by_arguments: dict[frozenset[str], set[str]] = {}
    for call in calls:
        function = call.get("function") or call if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping) and None in arguments.values():
            names_by_arguments.setdefault(frozenset(arguments), set()).add(str(function.get("name")))
    return any(len(names) > 1 for names in names_by_arguments.values())


def _without_fillers(value: Any, schema: ValueSchema, *, is_filled: bool) -> Any:
    """Return a value without the null fields that its file has added, at every depth.

    A schema that lists the fields of an object decides for those that it does not list. Null in a list is a value.
    """
    if isinstance(value, list):
        return [_without_fillers(each, schema.items(), is_filled=is_filled) for each in value]
    if not isinstance(value, Mapping):
        return value
    known = schema.property_schemas()
    required = schema.required()
    result = {}
    for name, each in value.items():
        is_filler = each is None and (is_filled or (bool(known) and name not in known))
        # A required field is there in every call, so that null is its value if it may be.
        if is_filler and not (name in required and known[name].allows(None)):
            continue
        result[name] = _without_fillers(each, known.get(name, schema.other_properties()), is_filled=is_filled)
    return result
