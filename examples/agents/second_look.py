"""An agent as a function: the policy answers, is shown its answer, and answers again. Only the second one counts.

[agent]
function = "examples/agents/second_look.py:run"
reward = "exit"
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp


async def run(task: Any) -> float:
    """Run one episode of two completions, which become one sequence, and return the reward."""
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        text = task.prompt
        for next_prompt in (f" {task.prompt}", ""):
            async with session.post(f"{task.base_url}/completions", json={"prompt": text}) as response:
                body = await response.json()
            if response.status != 200:
                raise RuntimeError(body["error"]["message"])
            answer = body["choices"][0]["text"]
            text += answer + next_prompt
    boxed = re.findall(r"\\boxed\{(-?\d+)\}", answer)
    return float(bool(boxed) and boxed[-1] == task.label)
