"""openai: four workers at the same time, then a summary of their answers."""

from __future__ import annotations

import asyncio
import time

import common
from openai import AsyncOpenAI


async def main() -> None:
    task, client = common.task(), AsyncOpenAI(max_retries=0)
    began = time.monotonic()

    async def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        response = await client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
        return response.choices[0].message.content or ""

    parts = await asyncio.gather(*(ask(f"{task['prompt']} (worker {n})") for n in range(4)))
    took = time.monotonic() - began
    last = await ask("Summarise: " + " ".join(parts))
    common.note(seconds=round(took, 2), last=last)
    common.reward(1)


if __name__ == "__main__":
    asyncio.run(main())
