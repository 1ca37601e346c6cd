"""What an agent gets back: bodies of OpenAI's answers, whole or as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from megatron_dppo.engines.agents.episode import Answer

MODEL = "policy"
"""The name of the model, where a call gives none."""


def whole(answer: Answer) -> dict[str, Any]:
    """The body of an answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None}
    if answer.call.is_chat:
        choice["message"] = {"role": "assistant", "content": _content(answer), "refusal": None}
        if answer.tool_calls:
            choice["message"]["tool_calls"] = _tool_calls(answer)
    else:
        choice["text"] = answer.text
    return {**_head(answer, "chat.completion" if answer.call.is_chat else "text_completion"), "choices": [choice]} | {
        "usage": _usage(answer)
    }


def chunks(answer: Answer) -> Iterator[bytes]:
    """Server-sent events of an answer that is complete."""
    head = _head(answer, "chat.completion.chunk" if answer.call.is_chat else "text_completion")

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode()

    def part(found: dict[str, Any], reason: str | None = None) -> bytes:
        body = {"delta": found} if answer.call.is_chat else {"text": found.get("content", "")}
        return event([{"index": 0, **body, "finish_reason": reason, "logprobs": None}])

    if answer.call.is_chat:
        yield part({"role": "assistant", "content": ""})
    if answer.text:
        yield part({"content": answer.text})
    for place, call in enumerate(_tool_calls(answer)):
        yield part({"tool_calls": [{"index": place, **call}]})
    yield part({}, answer.finish_reason)
    if answer.call.stream_usage:
        yield event([], usage=_usage(answer))
    yield b"data: [DONE]\n\n"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if answer.call.is_chat else "cmpl"
    model = answer.call.model or MODEL
    return {"id": f"{prefix}-{answer.name}", "object": kind, "created": int(time.time()), "model": model}


def _content(answer: Answer) -> str | None:
    return None if answer.tool_calls and not answer.text else answer.text


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    """With arguments as text, as OpenAI writes them."""
    return [
        {**call, "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.tool_calls
    ]


def _usage(answer: Answer) -> dict[str, int]:
    prompt, answered = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
