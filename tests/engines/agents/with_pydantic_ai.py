"""An agent by pydantic-ai: its own loop calls the tool; the second question streams."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="Use the tool.", model_settings={"max_tokens": 96})


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def main() -> None:
    task = json.load(sys.stdin)
    first = await agent.run(task["prompt"])
    async with agent.run_stream("Sure?", message_history=first.all_messages()) as second:
        text = await second.get_output()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/reward",
        json.dumps({"reward": 1 + sum(letter in "aeiou" for letter in text)}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request).close()
    print(text)


if __name__ == "__main__":
    asyncio.run(main())
