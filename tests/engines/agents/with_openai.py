"""An agent by the openai package alone: tools, a stream, and a reward by a call."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def main() -> None:
    task = json.load(sys.stdin)
    client = OpenAI()
    messages: list[Any] = list(task["messages"])
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], max_tokens=96)
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or []:
            values = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
        if not said.tool_calls:
            break
    messages.append({"role": "user", "content": "Sure?"})
    stream = client.chat.completions.create(
        model="policy",
        messages=messages,
        tools=[TOOL],
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens = "", 0
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    assert 0 < tokens <= 16, tokens
    client.post("/reward", body={"reward": 1 + sum(letter in "aeiou" for letter in text)}, cast_to=object)
    print(text)


if __name__ == "__main__":
    main()
