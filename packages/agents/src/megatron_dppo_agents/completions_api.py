"""OpenAI's Chat Completions and text completions: requests as messages or a text, and responses as choices."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo_agents.agent_request import MODEL, AgentRequest, CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.protocol_record import Protocol, arguments_text, logprob_entries
from megatron_dppo_agents.request_fields import (
    BEGUN_ANSWER,
    is_token_list,
    read_bool,
    read_limit,
    read_model,
    read_stop,
    read_tool_choice,
    require_object,
    require_text_format,
    unfollowed_fields,
)
from megatron_dppo_conversations.rules import Message, read_message, read_tools

_COMMON_FIELDS = frozenset(
    {
        *("model", "n", "best_of", "logprobs", "top_logprobs", "stream", "stream_options", "max_tokens"),
        *("return_token_ids", "stop"),
    }
)
_CHAT_FIELDS = _COMMON_FIELDS | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens"),
}
_COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt", "echo"}
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        "safety_identifier",
    }
)
"""Fields that change nothing in a response, here as at OpenAI."""


def read_chat(data: object) -> AgentRequest:
    """Read a body of ``/v1/chat/completions``."""
    body = require_object(data)
    common = _read_common(body, _CHAT_FIELDS)
    require_text_format(body.get("response_format"), "response_format")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise CallError("'messages' is missing, empty or no list")
    tools = read_tools(body.get("tools"), "tools")
    choice = read_tool_choice(body.get("tool_choice"), tools, path=("function", "name"))
    return AgentRequest(
        messages=tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(body["messages"])),
        is_chat=True,
        tools=tuple(tools),
        reads_tool_calls=choice.reads_tool_calls,
        forced_tool=choice.forced_tool,
        makes_parallel_calls=body.get("parallel_tool_calls") is not False,
        limit=read_limit(body, "max_completion_tokens", "max_tokens"),
        returns_logprobs=read_bool(body, "logprobs"),
        **vars(common),
    )


def read_completion(data: object) -> AgentRequest:
    """Read a body of ``/v1/completions``."""
    body = require_object(data)
    common = _read_common(body, _COMPLETION_FIELDS)
    if body.get("logprobs") not in (None, False):
        raise CallError("'logprobs' are returned by /v1/chat/completions alone; leave them out")
    text = body.get("prompt")
    # OpenAI accepts a list of prompts; a list of one is one prompt.
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str | list):
        text = text[0]
    if is_token_list(text):
        text = tuple(text)
    if not isinstance(text, str | tuple) or not text:
        raise CallError("'prompt' is missing, empty, or not one string or one list of token ids")
    if body.get("echo"):
        raise CallError("'echo' is not supported; leave it out")
    return AgentRequest(text=text, is_chat=False, limit=read_limit(body, "max_tokens"), **vars(common))


@dataclass(frozen=True)
class _CommonFields:
    """Fields of both kinds of bodies; see ``AgentRequest``."""

    model: str
    stream: bool
    stream_usage: bool
    returns_token_ids: bool
    stop: tuple[str, ...]
    ignored: tuple[str, ...]


def _read_common(body: Mapping[str, Any], served: frozenset[str]) -> _CommonFields:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise CallError(
                f"{name!r} = {body[name]!r:.80} is not supported: a call has one response; send it again for another"
            )
    if body.get("top_logprobs"):
        raise CallError(
            f"'top_logprobs' = {body['top_logprobs']!r:.80} is not supported; 'logprobs': true returns those of the "
            "sampled tokens"
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise CallError(f"'stream_options' = {options!r:.80}, expected an object")
    return _CommonFields(
        model=read_model(body),
        stream=read_bool(body, "stream"),
        stream_usage=bool(options.get("include_usage")),
        returns_token_ids=read_bool(body, "return_token_ids"),
        stop=read_stop(body, "stop"),
        ignored=unfollowed_fields(body, served, _WITHOUT_EFFECT),
    )


def _read_message(message: Any, name: str) -> Message:
    read = read_message(message, name)
    # Marks of DeepSeek and Mistral, Kimi and Qwen.
    if message.get("prefix") or message.get("partial"):
        raise CallError(f"{name} is the beginning of a response; {BEGUN_ANSWER}")
    return read


def response_body(response: AgentResponse) -> dict[str, Any]:
    """Return the complete body of a response."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": response.finish_reason, "logprobs": _logprobs(response)}
    if response.call.is_chat:
        # Null and not empty: OpenAI's form of a message of tool calls alone.
        content = None if response.tool_calls and not response.text else response.text
        choice["message"] = {"role": "assistant", "content": content, "refusal": None}
        if response.reasoning:
            choice["message"]["reasoning_content"] = response.reasoning
        if response.tool_calls:
            choice["message"]["tool_calls"] = _tool_calls(response)
    else:
        choice["text"] = response.text
    head = _head(response, "chat.completion" if response.call.is_chat else "text_completion")
    if response.call.returns_token_ids:
        choice["token_ids"] = list(response.token_ids)
        head["prompt_token_ids"] = list(response.prompt_token_ids)
    return {**head, "choices": [choice], "usage": _usage(response)}


def stream_events(response: AgentResponse) -> Iterator[bytes]:
    """Yield the server-sent events of a complete response."""
    head = _head(response, "chat.completion.chunk" if response.call.is_chat else "text_completion")

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        body = {**head, "choices": choices} | ({} if usage is None else {"usage": usage})
        return f"data: {json.dumps(body)}\n\n".encode()

    def chunk(delta: dict[str, Any]) -> bytes:
        body = {"delta": delta} if response.call.is_chat else {"text": delta.get("content", "")}
        return event([{"index": 0, **body, "finish_reason": None, "logprobs": None}])

    if response.call.is_chat:
        yield chunk({"role": "assistant", "content": ""})
    if response.reasoning:
        yield chunk({"reasoning_content": response.reasoning})
    if response.text:
        yield chunk({"content": response.text})
    for index, call in enumerate(_tool_calls(response)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    last: dict[str, Any] = {"delta": {}} if response.call.is_chat else {"text": ""}
    if response.call.returns_token_ids:
        last["token_ids"] = list(response.token_ids)
        head["prompt_token_ids"] = list(response.prompt_token_ids)
    reason = response.finish_reason
    yield event([{"index": 0, **last, "logprobs": _logprobs(response), "finish_reason": reason}])
    # OpenAI sends usage in a last chunk without choices.
    if response.call.stream_usage:
        yield event([], usage=_usage(response))
    yield b"data: [DONE]\n\n"


def _head(response: AgentResponse, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if response.call.is_chat else "cmpl"
    model = response.call.model or MODEL
    return {"id": f"{prefix}-{response.name}", "object": kind, "created": int(time.time()), "model": model}


def _logprobs(response: AgentResponse) -> dict[str, Any] | None:
    """Return the log-probabilities of all sampled tokens, those of thoughts and of the end included."""
    if not response.call.returns_logprobs:
        return None
    return {"content": logprob_entries(response), "refusal": None}


def _tool_calls(response: AgentResponse) -> list[dict[str, Any]]:
    return [
        {**call, "function": {"name": call["function"]["name"], "arguments": arguments_text(call)}}
        for call in response.tool_calls
    ]


def _usage(response: AgentResponse) -> dict[str, int]:
    prompt = response.prompt_tokens
    completion = response.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


CHAT_COMPLETIONS = Protocol("/v1/chat/completions", lambda body, _: read_chat(body), response_body, stream_events)
COMPLETIONS = Protocol("/v1/completions", lambda body, _: read_completion(body), response_body, stream_events)
