"""Rules of conversations that data rows and every API of agents share: messages, tools and tool calls."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_dppo_conversations.formats.base import ARGUMENT_FIELDS, ToolCall, call_arguments, make_tool_call
from megatron_dppo_conversations.formats.json_values import parse_json

Message = dict[str, Any]
"""Message with ``role`` and ``content`` (a string).

Optional are ``reasoning_content``, ``tool_calls`` (``ToolCall``), ``tool_call_id`` and ``name``.
"""
WrittenMessage = Mapping[str, Any]
"""The same, as it is written by a template."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of read messages. ``developer`` is read as ``system``, its older name, which all templates know."""
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Types of parts with text, in any API."""
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of thoughts beside the content: DeepSeek and Qwen; vLLM and OpenRouter; gpt-oss.

A read message has the first of them.
"""
_UNREAD_ANSWERS = ("function_call", "audio", "refusal")
"""Fields of OpenAI's answers that have text or calls in another form."""
_SCHEMA_FIELDS = ("parameters", "input_schema", "inputSchema")
"""Names of a tool's JSON schema: OpenAI, Anthropic and MCP."""
_TOOL_FIELDS = ("name", "description", "parameters")
"""Fields of a flat tool that are the function's."""


class ConversationError(ValueError):
    """Messages or tools that no chat template can be given."""


def read_tool(tool: object, name: str, *, kinds: Collection[str | None] = ("function", None)) -> dict[str, Any]:
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
    # In the order in which they were sent. ``strict`` is a setting of the API.
    fields = {"parameters" if field == key else field: value for field, value in function.items() if value is not None}
    is_inside = function is not tool
    read = {
        field: value for field, value in fields.items() if field in _TOOL_FIELDS or (is_inside and field != "strict")
    }
    return {"type": "function", "function": {**read, "parameters": schema}}


def read_tools(
    tools: object, name: str, *, kinds: Collection[str | None] = ("function", None)
) -> list[dict[str, object]]:
    """Return a list of tools, which may be missing; see ``read_tool``."""
    entries = tools or []
    if not isinstance(entries, list):
        raise ConversationError(f"{name} = {entries!r:.80}, expected a list of objects")
    return [read_tool(tool, f"{name}[{index}]", kinds=kinds) for index, tool in enumerate(entries)]


def read_tool_call(call: object, name: str) -> ToolCall:
    """Return a tool call as chat templates expect it: its arguments are an object, also if they were JSON as text.

    Its function is inside, or its fields stand in the call. A malformed one raises ``ConversationError``.
    """
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function") or fields
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConversationError(f"{name} has an entry without a function's name")
    call_id = fields.get("id") or ""
    if not isinstance(call_id, str):
        raise ConversationError(f"{name} has the id {call_id!r:.80}, expected a string")
    arguments = call_arguments(function)
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError as error:
            raise ConversationError(f"{name} has arguments that are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        known = " or ".join(map(repr, ARGUMENT_FIELDS))
        raise ConversationError(f"{name} has a call without {known}: {function!r:.80}; expected an object, or its JSON")
    return make_tool_call(call_id, function["name"], arguments)


def read_content(content: object, name: str) -> str:
    """Return the text of a content: a string, or a list of parts. A part that is no text is refused by its type."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"{name} has the content {content!r:.80}, expected text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ConversationError(
                f"{name} has a part that is no text (type {kind!r:.80}); the policy reads text alone. Leave it out"
            )
    return "".join(part["text"] for part in content)


def read_message(message: object, name: str) -> Message:
    """Return a message of a row or of chat completions, as chat templates expect it.

    Args:
        message: Role, content as text or parts of text, thoughts under any of their names, and tool calls. Content may
            be missing beside calls or thoughts.
        name: Position of the message, for ``ConversationError``.
    """
    fields = message if isinstance(message, Mapping) else {}
    role = "system" if fields.get("role") == "developer" else fields.get("role")
    if role not in ROLES:
        raise ConversationError(f"{name} has the role {role!r:.80}; expected one of {', '.join(ROLES)}")
    for field in _UNREAD_ANSWERS:
        if fields.get(field):
            raise ConversationError(f"{name} has {field!r}, which no chat template reads; send text and 'tool_calls'")
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ConversationError(f"{name}: tool_calls = {calls!r:.80}, expected a list, in a message of the assistant")
    thoughts = [fields[field] for field in THOUGHT_FIELDS if isinstance(fields.get(field), str) and fields[field]]
    is_assistant = role == "assistant"
    content = fields.get("content")
    has_more = bool(calls) or (is_assistant and bool(thoughts))
    result = {"role": role, "content": "" if content is None and has_more else read_content(content, name)}
    if is_assistant and thoughts:
        result["reasoning_content"] = thoughts[0]
    if calls:
        result["tool_calls"] = [read_tool_call(call, f"{name}: tool_calls") for call in calls]
    return result | {field: fields[field] for field in ("tool_call_id", "name") if isinstance(fields.get(field), str)}


def with_text_arguments(messages: Sequence[WrittenMessage]) -> list[Message]:
    """Return messages whose tool calls have their arguments as text, which the templates of some families need."""
    result: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        result.append({**message, "tool_calls": calls} if calls else dict(message))
    return result


def with_descriptions(tools: Sequence[WrittenMessage]) -> list[WrittenMessage]:
    """Return tools that all have a description, without which gpt-oss' template fails."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def with_thinking(messages: Sequence[WrittenMessage]) -> list[Message]:
    """Return messages whose thoughts have the name that gpt-oss' template reads.

    It writes the content beside a call as a thought, and refuses both.
    """
    result: list[Message] = []
    for each in messages:
        message = dict(each)
        if thoughts := message.pop("reasoning_content", ""):
            if message.get("tool_calls") and message["content"]:
                thoughts = f"{thoughts}\n\n{message['content']}"
                message["content"] = ""
            message["thinking"] = thoughts
        result.append(message)
    return result


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of tools in the order of the calls that they answer.

    Many templates leave out the ids of calls, so that the policy would take one result for another. Results without an
    id belong to the calls without a result, in their order, and all do if the calls have none. An unknown id, or one
    twice, raises ``ConversationError``.
    """
    result: list[Message] = []
    positions: dict[str, int] = {}
    answered: set[str] = set()
    results: list[Message] = []
    has_ids = True

    def flush() -> None:
        unanswered = [call_id for call_id in positions if call_id not in answered]
        for each, message in enumerate(results):
            if unanswered and not message.get("tool_call_id"):
                results[each] = {**message, "tool_call_id": unanswered.pop(0)}
        result.extend(sorted(results, key=lambda message: positions.get(message.get("tool_call_id", ""), -1)))
        results.clear()

    for index, message in enumerate(messages):
        if message["role"] != "tool":
            flush()
        if message["role"] == "assistant":
            ids = [call.get("id") for call in message.get("tool_calls", ())]
            has_ids = any(ids) or not ids
            positions = {call_id: number for number, call_id in enumerate(ids) if call_id}
            if len(positions) < sum(map(bool, ids)):
                raise ConversationError(f"messages[{index}].tool_calls have one id twice; expected an id for each call")
            answered = set()
        if message["role"] != "tool":
            result.append(message)
            continue
        call_id = message.get("tool_call_id", "")
        if call_id and call_id in answered:
            raise ConversationError(
                f"messages[{index}].tool_call_id = {call_id!r:.80} has a result already; send one a call"
            )
        if call_id and call_id not in positions and has_ids:
            known = ", ".join(map(repr, positions)) or "it has none"
            raise ConversationError(
                f"messages[{index}].tool_call_id = {call_id!r:.80} is no call of the response before it "
                f"({known:.200}); send the id of the call that the result belongs to"
            )
        answered.add(call_id)
        results.append(message)
    flush()
    if result and result[-1].get("tool_calls"):
        raise ConversationError(
            "the messages end with tool calls, which have no results. Add a message of the role tool for each, or "
            "remove the last message"
        )
    return result


def fold_notes(messages: Sequence[WrittenMessage]) -> list[Message]:
    """Return messages with one system message, the first; later ones are a part of the user's message before them.

    Clients add notes in the middle of a conversation, where few templates accept a system message. A note without a
    user's message before it becomes one.
    """
    result: list[Message] = []
    for is_note, group in groupby(messages, lambda message: message["role"] == "system"):
        if not is_note:
            result += [dict(message) for message in group]
            continue
        texts = [message["content"] for message in group]
        role = "user" if result else "system"
        if result and result[-1]["role"] == "user":
            texts.insert(0, result.pop()["content"])
        result.append({"role": role, "content": "\n\n".join(texts)})
    return result
