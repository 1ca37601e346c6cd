"""OpenAI's Responses: requests and responses as items, and conversations by the id of the last response."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo_agents.agent_request import MODEL, AgentRequest, CallError, Message
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.protocol_record import (
    Protocol,
    StoredResponses,
    arguments_text,
    logprob_entries,
    named_event,
)
from megatron_dppo_agents.request_fields import (
    read_bool,
    read_limit,
    read_model,
    read_tool_choice,
    read_tools,
    require_object,
    require_text_format,
    text_of_parts,
    unfollowed_fields,
)
from megatron_dppo_conversations.formats.base import make_tool_call

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
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


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
    instructions = text_of_parts(body.get("instructions"), _TEXT_PARTS, "'instructions'")
    tools = read_tools(body)
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
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call_output":
            call_id = item.get("call_id")
            if not isinstance(call_id, str):
                raise CallError(f"{name} has no call_id")
            content = text_of_parts(item.get("output"), _TEXT_PARTS, f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise CallError(f"{name} has the role {item.get('role')!r:.80}; expected {', '.join(_ROLES)}")
            content = text_of_parts(item.get("content"), _TEXT_PARTS, f"{name}.content")
            if role == "assistant":
                _open_answer(messages, "content", "tool_calls")["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
                raise CallError(f"{name} has no name or no call_id")
            if not isinstance(item.get("arguments", ""), str):
                raise CallError(f"{name}.arguments = {item['arguments']!r:.80}, expected JSON as a string")
            call = make_tool_call(item["call_id"], item["name"], item.get("arguments") or "{}")
            _open_answer(messages).setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            message = _open_answer(messages, "reasoning_content", "content", "tool_calls")
            message["reasoning_content"] = _reasoning_text(item, name)
        else:
            raise CallError(
                f"{name} has the type {kind!r:.80}; expected message, function_call, function_call_output or reasoning"
            )
    return messages


def _open_answer(messages: list[Message], *taken: str) -> Message:
    """Return the assistant's message at the end, if it has none of the fields ``taken`` yet; otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning_text(item: Mapping[str, Any], name: str) -> str:
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if text := text_of_parts(item.get(key), [kind], f"{name}.{key}"):
            return text
    return ""


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
