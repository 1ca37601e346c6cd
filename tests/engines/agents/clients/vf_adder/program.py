"""A tool loop by openai; the question is an argument."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def main() -> None:
    client, messages = OpenAI(max_retries=0), [{"role": "user", "content": sys.argv[1]}]
    for _ in range(4):
        request: Any = dict(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL], max_tokens=256)
        message = client.chat.completions.create(**request).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            values = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
        if not message.tool_calls:
            return


if __name__ == "__main__":
    main()
