"""Response bodies of OpenAI's API, complete or as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from megatron_dppo.engines.agents.agent_response import AgentResponse
from megatron_dppo.engines.agents.protocol_record import arguments_text
from megatron_dppo.engines.agents.request_bodies import MODEL


def response_body(response: AgentResponse) -> dict[str, Any]:
    """Return the complete body of a response."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": response.finish_reason, "logprobs": _logprobs(response)}
    if response.call.is_chat:
        choice["message"] = {"role": "assistant", "content": _content(response), "refusal": None}
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
    tokens = zip(response.token_texts, response.logprobs, strict=True)
    entries = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in tokens
    ]
    return {"content": entries, "refusal": None}


def _content(response: AgentResponse) -> str | None:
    # Null and not empty: OpenAI's form of a message of tool calls alone.
    return None if response.tool_calls and not response.text else response.text


def _tool_calls(response: AgentResponse) -> list[dict[str, Any]]:
    """Return the tool calls with their arguments as text, as in OpenAI's API."""
    return [
        {**call, "function": {"name": call["function"]["name"], "arguments": arguments_text(call)}}
        for call in response.tool_calls
    ]


def _usage(response: AgentResponse) -> dict[str, int]:
    prompt = response.prompt_tokens
    completion = response.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
