"""openai: fields that agents send, one call each, and the answer to each."""

from __future__ import annotations

import base64
import sys
from typing import Any

import common
from openai import APIError, OpenAI

PIXEL = base64.b64encode(b"no picture").decode()
QUESTION = [{"role": "user", "content": "1+2"}]
SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tool_choice_required": {"tools": [common.CHAT_TOOL], "tool_choice": "required"},
    "tool_choice_named": {
        "tools": [common.CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "tool_choice_none": {"tools": [common.CHAT_TOOL], "tool_choice": "none"},
    "parallel_tool_calls_false": {"tools": [common.CHAT_TOOL], "parallel_tool_calls": False},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "total", "schema": SCHEMA, "strict": True}}
    },
    "stop": {"stop": ["STOP"]},
    "temperature_0": {"temperature": 0},
    "reasoning_effort": {"reasoning_effort": "low"},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                ],
            }
        ]
    },
    "reasoning_content_sent_back": {
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": "3", "reasoning_content": "One and two."},
            {"role": "user", "content": "Sure?"},
        ]
    },
    "return_token_ids": {"extra_body": {"return_token_ids": True}},
}


def main() -> None:
    common.task()
    client = OpenAI(max_retries=0)
    for name, options in FIELDS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            response = client.chat.completions.create(
                **{"model": "policy", "messages": QUESTION, "max_tokens": 256, **options}
            )
        except APIError as error:
            common.note(field=name, error=type(error).__name__, message=str(error)[:300])
        else:
            one = response.choices[0]
            message = one.message.model_dump(exclude_none=True)
            common.note(field=name, choices=len(response.choices), finish=one.finish_reason, message=message)
    common.reward(1)


if __name__ == "__main__":
    main()
