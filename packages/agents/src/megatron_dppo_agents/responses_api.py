"""OpenAI's Responses: requests and responses as items, and conversations by the id of the last response."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo_agents.agent_request import MODEL, AgentRequest, CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.protocol_record import Protocol, StoredResponses, arguments_text, logprob_entries, named_event
from megatron_dppo_agents.request_fields import (
    read_bool,
    read_limit,
    read_model,
    read_tool_choice,
    require_object,
    require_text_format,
    unfollowed_fields,
)
from megatron_dppo_conversations.rules import Message, read_content, read_message, read_tools

_SERVED = frozenset(
    {
        *("model", "input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls"),
        *("stream", "previous_response_id", "text", "include"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("store", "metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "stream_options"),
    }
)
"""Fields that change nothing in a response, here as there."""
_LOGPROBS = "message.output_text.logprobs"
"""Entry of ``include`` that has an effect. The others are about hosted tools and images."""


def read_responses(data: object, stored: StoredResponses) -> AgentRequest:
    """Read a body of ``/v1/responses``."""
    body = require_object(data)
    before = _previous_messages(body.get("previous_response_id"), stored.messages)
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not (items or before):
        raise CallError("'input' is missing, empty, or neither a string nor a list of items")
    text_options = body.get("text") or {}
    require_text_format(text_options.get("format") if isinstance(text_options, dict) else text_options, "text.format")
    instructions = read_content(body.get("instructions") or "", "'instructions'")
    tools = read_tools(body.get("tools"), "tools")
    choice = read_tool_choice(body.get("tool_choice"), tools)
    history = [*before, *_read_items([_referenced_item(item, index, stored) for index, item in enumerate(items)])]
    return AgentRequest(
        model=read_model(body),
        messages=(*([{"role": "system", "content": instructions}] if instructions else []), *history),
        num_instructions=int(bool(instructions)),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=choice.reads_tool_calls,
        forced_tool=choice.forced_tool,
        makes_parallel_calls=body.get("parallel_tool_calls") is not False,
        limit=read_limit(body, "max_output_tokens"),
        stream=read_bool(body, "stream"),
        returns_logprobs=_LOGPROBS in (body.get("include") or ()),
        ignored=unfollowed_fields(body, _SERVED, _WITHOUT_EFFECT),
    )


def store_response(response: AgentResponse, stored: StoredResponses) -> None:
    """Keep a response for ``previous_response_id``, and its items. Its instructions are not carried over."""
    call = response.call
    stored.items.update({item["id"]: item for item in _output(response)})
    stored.messages[f"resp_{response.name}"] = (*call.messages[call.num_instructions :], response.message)


def _previous_messages(response_id: Any, stored: Mapping[str, Sequence[Message]]) -> Sequence[Message]:
    if response_id is None:
        return ()
    if not isinstance(response_id, str) or response_id not in stored:
        raise CallError(
            f"'previous_response_id' = {response_id!r:.80} is no response of this episode",
            400,
            "previous_response_not_found",
        )
    return stored[response_id]


def _referenced_item(item: Any, index: int, stored: StoredResponses) -> Any:
    """Return the item of an earlier response that an item names by its id; any other item as it is."""
    if not isinstance(item, dict) or item.get("type", None if "role" in item else "item_reference") != "item_reference":
        return item
    item_id = item.get("id")
    if not isinstance(item_id, str) or item_id not in stored.items:
        raise CallError(
            f"input[{index}] is an 'item_reference' to {item_id!r:.80}, which no response of this episode has; send "
            "the item itself",
            400,
            "item_not_found",
        )
    return stored.items[item_id]


def _read_items(items: Sequence[Any]) -> list[Message]:
    """Return items as messages. Reasoning, text and calls in a row are one message of the assistant."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        name = f"input[{index}]"
        message = read_message(_chat_message(item, name), name)
        if not messages or not _is_same_answer(messages[-1], message):
            messages.append(message)
            continue
        calls = [*messages[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
        messages[-1] |= {field: value for field, value in message.items() if value}
        messages[-1] |= {"tool_calls": calls} if calls else {}
    return messages


def _is_same_answer(last: Message, message: Message) -> bool:
    """Return True if an item belongs to the answer before it: thoughts, text and calls come in this order."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    if message.get("tool_calls"):
        return True
    has_thoughts = bool(last.get("reasoning_content")) and bool(message.get("reasoning_content"))
    return not (last["content"] or last.get("tool_calls") or has_thoughts)


def _chat_message(item: Any, name: str) -> Message:
    """Return an item as a message of chat completions, which is not read yet."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "reasoning":
        thoughts = read_content(item.get("content") or [], name) or read_content(item.get("summary") or [], name)
        return {"role": "assistant", "content": "", "reasoning_content": thoughts}
    if kind not in ("function_call", "function_call_output"):
        raise CallError(
            f"{name} has the type {kind!r:.80}; expected message, function_call, function_call_output or reasoning"
        )
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise CallError(f"{name} has no call_id")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": call_id, "content": item.get("output")}
    function = {field: value for field, value in item.items() if field not in ("type", "id", "call_id", "status")}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}


def _output(response: AgentResponse) -> list[dict[str, Any]]:
    name = response.name
    items: list[dict[str, Any]] = []
    if response.reasoning:
        content = [{"type": "reasoning_text", "text": response.reasoning}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    status = "incomplete" if response.finish_reason == "length" else "completed"
    if response.text or not response.tool_calls:
        logprobs = logprob_entries(response) if response.call.returns_logprobs else []
        text = {"type": "output_text", "text": response.text, "annotations": [], "logprobs": logprobs}
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        items.append({**message, "content": [text]})
    for index, call in enumerate(response.tool_calls):
        item = {"id": f"fc_{name}{index}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        items.append({**item, "name": call["function"]["name"], "arguments": arguments_text(call)})
    return items


def responses_body(response: AgentResponse) -> dict[str, Any]:
    """Return the complete body of a response."""
    call = response.call
    is_cut_off = response.finish_reason == "length"
    instructions = call.messages[0]["content"] if call.num_instructions else None
    prompt, completion = response.prompt_tokens, response.completion_tokens
    return {
        "id": f"resp_{response.name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": call.model or MODEL,
        "status": "incomplete" if is_cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "instructions": instructions,
        "metadata": {},
        "output": _output(response),
        "parallel_tool_calls": call.makes_parallel_calls,
        "tool_choice": "auto" if call.reads_tool_calls or not call.tools else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def responses_events(response: AgentResponse) -> Iterator[bytes]:
    """Yield the server-sent events of a complete response, with rising sequence numbers."""
    body = responses_body(response)
    started = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": started}),
        ("response.in_progress", {"response": started}),
    ]
    for index, item in enumerate(body["output"]):
        events += _item_events(item, index)
    events.append((f"response.{body['status']}", {"response": body}))
    for number, (name, fields) in enumerate(events):
        yield named_event(name, {"sequence_number": number, **fields})


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    where = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    status = {"status": "in_progress"} if "status" in item else {}
    yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, **status}}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**where, **done}
    else:
        (part,) = item["content"]
        where["content_index"] = 0
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield (
            "response.content_part.added",
            {**where, "part": {**part, "text": "", **({"logprobs": []} if logprobs else {})}},
        )
        yield f"response.{kind}.delta", {**where, "delta": part["text"], **logprobs}
        yield f"response.{kind}.done", {**where, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**where, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


RESPONSES = Protocol("/v1/responses", read_responses, responses_body, responses_events, store=store_response)
