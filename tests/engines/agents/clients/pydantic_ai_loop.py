"""pydantic-ai with its own loop: `structured` (an output type), `anthropic`, `responses`, `stream`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import common
from pydantic import BaseModel
from pydantic_ai import Agent


class Total(BaseModel):
    """Structured output of the agent."""

    total: int


def model(words: list[str]) -> Any:
    if "anthropic" in words:
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=common.anthropic_base(), api_key=common.anthropic_key(), max_retries=0)
        return AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if "responses" in words else OpenAIChatModel
    return kind("policy", provider=OpenAIProvider(openai_client=AsyncOpenAI(max_retries=0)))


async def main() -> None:
    words, task = sys.argv[1:], common.task()
    options: dict[str, Any] = {"output_type": Total} if "structured" in words else {}
    agent = Agent(model(words), instructions="Use the tool.", model_settings={"max_tokens": 256}, **options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two whole numbers."""
        return a + b

    if "stream" in words:
        async with agent.run_stream(task["prompt"]) as run:
            response = await run.get_output()
    else:
        response = (await agent.run(task["prompt"])).output
    common.note(last=str(response))
    common.reward(1)


if __name__ == "__main__":
    asyncio.run(main())
