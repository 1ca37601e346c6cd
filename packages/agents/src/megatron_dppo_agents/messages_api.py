"""Anthropic's Messages: requests as messages of a chat, and responses as content blocks."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo_agents.agent_request import MODEL, AgentRequest, CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.protocol_record import Protocol, StoredResponses, named_event
from megatron_dppo_agents.request_fields import (
    BEGUN_ANSWER,
    read_bool,
    read_limit,
    read_model,
    read_stop,
    read_tool_choice,
    require_object,
    unfollowed_fields,
)
from megatron_dppo_conversations.rules import Message, read_content, read_message, read_tools

_SERVED = frozenset({"model", "max_tokens", "messages", "system", "tools", "tool_choice", "stream", "stop_sequences"})
_WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "cache_control", "betas", "inference_geo"})
"""Fields that change nothing in a response, here as there."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": None, "none": "none"}
"""OpenAI's words for the types of ``tool_choice``. None: an object that names the tool."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_SIGNATURE = "unsigned"
"""Clients expect one in each block of thoughts. Nothing checks it."""


def read_messages(data: object, _: StoredResponses | None = None) -> AgentRequest:
    """Read a body of ``/v1/messages``."""
    body = require_object(data)
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallError("'messages' is missing, empty or no list")
    output = body.get("output_format") or body.get("output_config")
    if isinstance(output, dict) and (output.get("format") or output.get("type")):
        raise CallError(
            "an output format is not supported, since it would change the probabilities of the tokens; describe the "
            "format in a message, or give a tool"
        )
    system = read_content(body.get("system") or "", "'system'")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body["messages"]):
        name = f"messages[{index}]"
        messages += [read_message(each, name) for each in _chat_messages(message, name)]
    if messages[-1]["role"] == "assistant":
        raise CallError(f"the last message is the assistant's; {BEGUN_ANSWER}")
    tools = read_tools(body.get("tools"), "tools", kinds=("custom", None))
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type", "auto") not in _TOOL_CHOICES:
        raise CallError(f"'tool_choice' = {choice!r:.200}, expected an object with the type auto, any, tool or none")
    tool_choice = read_tool_choice(_TOOL_CHOICES[choice.get("type", "auto")] or choice, tools, kind="tool")
    return AgentRequest(
        model=read_model(body),
        messages=tuple(messages),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=tool_choice.reads_tool_calls,
        forced_tool=tool_choice.forced_tool,
        makes_parallel_calls=choice.get("disable_parallel_tool_use") is not True,
        limit=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        stream=read_bool(body, "stream"),
        ignored=unfollowed_fields(body, _SERVED | {"output_format", "output_config"}, _WITHOUT_EFFECT),
    )


def _chat_messages(message: Any, name: str) -> list[Message]:
    """Return the messages of chat completions that one message stands for, which are not read yet."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise CallError(f"{name} has the role {role!r:.80}; expected user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise CallError(f"{name}.content = {content!r:.200}, expected a string or a list of blocks")
    if role == "assistant":
        return [_chat_answer(blocks, name)]
    results = [_chat_result(block, name) for block in blocks if block.get("type") == "tool_result" and role == "user"]
    texts = [block for block in blocks if block.get("type") != "tool_result" or role != "user"]
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _chat_result(block: Mapping[str, Any], name: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise CallError(f"{name} has a tool_result without tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": block.get("content") or ""}


def _chat_answer(blocks: list[dict[str, Any]], name: str) -> Message:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("id"), str):
            function = {field: value for field, value in block.items() if field not in ("input", "cache_control")}
            calls.append({"id": block["id"], "function": {**function, "arguments": block.get("input")}})
        elif kind in ("thinking", "tool_use"):
            raise CallError(f"{name} has a block of type {kind!r} without its text or id")
        elif kind != "redacted_thinking":
            texts.append(block)
    return {"role": "assistant", "content": texts, "reasoning_content": "".join(thoughts), "tool_calls": calls}


def _blocks(response: AgentResponse) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if response.reasoning:
        blocks.append({"type": "thinking", "thinking": response.reasoning, "signature": _SIGNATURE})
    if response.text or not response.tool_calls:
        blocks.append({"type": "text", "text": response.text})
    for call in response.tool_calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def message_body(response: AgentResponse) -> dict[str, Any]:
    """Return the complete body of a response."""
    return {
        "id": f"msg_{response.name}",
        "type": "message",
        "role": "assistant",
        "model": response.call.model or MODEL,
        "content": _blocks(response),
        "stop_reason": _STOP_REASONS[response.finish_reason] if response.stop_string is None else "stop_sequence",
        "stop_sequence": response.stop_string,
        "usage": {"input_tokens": response.prompt_tokens, "output_tokens": response.completion_tokens},
    }


def message_events(response: AgentResponse) -> Iterator[bytes]:
    """Yield the server-sent events of a complete response."""
    body = message_body(response)
    blocks = body.pop("content")
    usage = body.pop("usage")
    started = {
        **body,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield named_event("message_start", {"message": started})
    for index, block in enumerate(blocks):
        empty, deltas = _block_deltas(block)
        yield named_event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield named_event("content_block_delta", {"index": index, "delta": delta})
        yield named_event("content_block_stop", {"index": index})
    delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    yield named_event("message_delta", {"delta": delta, "usage": {"output_tokens": usage["output_tokens"]}})
    yield named_event("message_stop", {})


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as its stream begins, and the deltas that complete it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [
            thought,
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    text = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def error_body(error: CallError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Clients recognize a conversation that is too long by these words.
    prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{prefix}{error}"}}


MESSAGES = Protocol("/v1/messages", read_messages, message_body, message_events)
