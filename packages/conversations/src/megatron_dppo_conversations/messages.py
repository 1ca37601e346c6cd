"""Messages and tools of data rows, without the null fields of columnar files, and errors that name other formats."""

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_dppo_conversations.formats.base import ToolCall, call_arguments
from megatron_dppo_conversations.formats.json_values import parse_json
from megatron_dppo_conversations.formats.schemas import Tools, ValueSchema, parameters_schema
from megatron_dppo_conversations.rules import (
    THOUGHT_FIELDS,
    ConversationError,
    order_tool_results,
    read_message,
    read_tools,
)

Messages = list[dict[str, Any]]
_NULL_IS_A_VALUE = ("const", "default", "enum", "example", "examples")
"""Fields of a JSON schema in which null is no filler."""
TOOL_COLUMNS = ("tools", "tool_defs")
"""Columns of a row with its tools: TRL, SkyRL and NeMo; verifiers."""
_MEDIA_LISTS = ("images", "videos", "audios")
_MEDIA = (*_MEDIA_LISTS, "image", "video", "audio")
_TEXT_ONLY = "the model is trained on text alone. Leave out rows with images, video or audio"
_SHAREGPT = "ShareGPT rows, with 'from' and 'value'. Convert them to 'role' (system, user, assistant) and 'content'"


def parse_messages(text: str) -> Messages | None:
    """Return the messages that a text holds as JSON; None for other text, ``ValueError`` if Python printed them."""
    stripped = text.strip()
    # A cheap test first, because most prompts are no JSON.
    if not (stripped.startswith("[") and stripped.endswith("]") and ("role" in stripped or "from" in stripped)):
        return None
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        if _is_python_list(stripped):
            raise ValueError(
                "the text is a list of messages as Python prints it (str), not JSON. Write it with json.dumps"
            ) from None
        return None
    is_list = isinstance(value, list) and bool(value)
    return (
        value if is_list and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in value) else None
    )


def _is_python_list(text: str) -> bool:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def media_problem(record: Mapping[str, object]) -> str:
    """Return why a row is not text alone; an empty string if it is.

    Columns are those of TRL, verl and Hugging Face datasets. A text in ``image`` may name a container.
    """
    for name in _MEDIA:
        value = record.get(name)
        first = value[0] if isinstance(value, list) and value else value
        is_file = isinstance(first, Mapping) and bool({"bytes", "path", "url"} & first.keys())
        if is_file or (name in _MEDIA_LISTS and isinstance(value, list) and value):
            return f"field {name!r} is not empty, and {_TEXT_ONLY}"
    return ""


def read_row_messages(value: Sequence[object], tools: Tools = (), *, is_columnar: bool = False) -> Messages:
    """Return the messages of a row in the form that chat templates expect.

    Empty fields leave: a columnar file gives every message, and every tool call, the fields of all. Anything but
    messages raises ``ConversationError``.

    Args:
        value: Entries of the row's list.
        tools: Tools of the row.
        is_columnar: See ``read_row_tools``.
    """
    messages: Messages = []
    for index, each in enumerate(value):
        if not isinstance(each, Mapping):
            raise ConversationError(f"entry {index} is {each!r:.80}, expected a message {{role, content}}")
        if "role" not in each and "from" in each:
            raise ConversationError(f"these are {_SHAREGPT}")
        fields = {name: part for name, part in each.items() if part is not None}
        message = read_message(fields, f"message {index}")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = _without_filled_arguments(fields["tool_calls"], calls, tools, is_columnar)
        # A template may read more fields than those of all APIs.
        messages.append({name: part for name, part in fields.items() if name not in THOUGHT_FIELDS} | message)
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise ConversationError("all messages are empty")
    if all(message["role"] == "assistant" for message in messages):
        raise ConversationError("there is no message before the assistant's")
    return order_tool_results(messages)


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
                raise ConversationError(f"field {column!r} is no JSON ({error})") from error
        if not tools:
            continue
        if isinstance(tools, list):
            keeps = () if is_columnar else _NULL_IS_A_VALUE
            tools = [_without_null_fields(_parsed_object(tool), keeps=keeps) for tool in tools]
        return read_tools(tools, f"field {column!r}")
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


def _without_filled_arguments(
    sent: Sequence[Any], calls: Sequence[ToolCall], tools: Tools, is_columnar: bool
) -> list[dict[str, Any]]:
    """Return the tool calls of a row's message without arguments that only fill other calls' fields.

    Arguments that were sent as JSON text have no fillers.
    """
    result: list[dict[str, Any]] = []
    is_filled = is_columnar or _fill_each_other(calls)
    for raw, call in zip(sent, calls, strict=True):
        function = call["function"]
        if not isinstance(call_arguments(raw.get("function") or raw), str):
            schema = parameters_schema(tools, function["name"])
            function["arguments"] = _without_fillers(function["arguments"], schema, is_filled=is_filled)
        result.append({key: part for key, part in call.items() if key != "id" or part})
    return result


def _fill_each_other(calls: Sequence[ToolCall]) -> bool:
    """Return True if calls of several tools have the same arguments, as in JSON that a columnar file was written to."""
    names_by_arguments: dict[frozenset[str], set[str]] = {}
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, Mapping) and None in arguments.values():
            names_by_arguments.setdefault(frozenset(arguments), set()).add(call["function"]["name"])
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


def missing_prompt_hint(record: Mapping[str, object]) -> str:
    """Return a sentence about a known format whose prompt is under another name; empty if it is none."""
    for name in ("conversations", "conversation"):
        turns = record.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "from" in turns[0]:
            return f"{name!r} holds {_SHAREGPT}"
        if isinstance(turns, list):
            return f"data.prompt_key = {name!r} reads its messages"
    return ""
