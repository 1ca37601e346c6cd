"""openai-agents with its own loop: `responses` (its default), `stream`, `subagent` (a tool), `handoff`."""

from __future__ import annotations

import asyncio
import sys

import common
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


async def main() -> None:
    words, task = sys.argv[1:], common.task()
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if "responses" in words else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=AsyncOpenAI(max_retries=0))
    settings = ModelSettings(max_tokens=256)
    adder = Agent(name="adder", instructions="Use the tool.", model=model, tools=[add], model_settings=settings)
    agent = adder
    if "subagent" in words:
        tool = adder.as_tool(tool_name="ask_adder", tool_description="Lets the adder work.")
        agent = Agent(name="boss", instructions="Delegate.", model=model, tools=[tool], model_settings=settings)
    if "handoff" in words:
        agent = Agent(name="boss", instructions="Hand over.", model=model, handoffs=[adder], model_settings=settings)
    if "stream" in words:
        run = Runner.run_streamed(agent, task["prompt"])
        async for _ in run.stream_events():
            pass
        response = run.final_output
    else:
        response = (await Runner.run(agent, task["prompt"])).final_output
    common.note(last=str(response))
    common.reward(1)


if __name__ == "__main__":
    asyncio.run(main())
