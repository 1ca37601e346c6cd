"""An agent by openai-agents: its own loop calls the tool; the second question goes on with its history."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import httpx2
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def main() -> None:
    task = json.load(sys.stdin)
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(
        name="adder",
        instructions="Use the tool.",
        model=model,
        tools=[add],
        model_settings=ModelSettings(max_tokens=96),
    )
    first = await Runner.run(agent, task["prompt"])
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    reward = {"reward": 1 + sum(letter in "aeiou" for letter in second.final_output)}
    url = os.environ["OPENAI_BASE_URL"] + "/reward"
    async with httpx2.AsyncClient() as client:
        (await client.post(url, json=reward, headers=headers)).raise_for_status()
    print(second.final_output)


if __name__ == "__main__":
    asyncio.run(main())
