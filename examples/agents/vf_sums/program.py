"""An agent by the package openai: it may call a tool for each sum. The question is its argument."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def main() -> None:
    """Ask, call tools, and ask again, up to four times."""
    client = OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(4):
        answer = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL], max_tokens=256
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            values = json.loads(call.function.arguments)
            content = str(values["a"] + values["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not said.tool_calls:
            return


if __name__ == "__main__":
    main()
