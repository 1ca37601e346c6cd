"""verifiers 0.4: an environment plays one episode through its relay. The prompt names its task."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parent))

import verifiers.v1 as vf


async def main() -> None:
    row = common.task()
    config = vf.SingleAgentEnvConfig(
        taskset={"id": "vf_adder"},
        agent=vf.AgentConfig(harness={"id": "vf_adder"}, runtime={"type": "subprocess"}),
    )
    env = vf.load_environment(config)
    task = next(task for task in env.taskset if task.data.name == row["prompt"])
    context = vf.ModelContext(
        model="policy",
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
        sampling=vf.Sampling(max_tokens=256),
    )
    async with env.serving():
        episode = await env.run_episode(task, context)
    trace = episode.traces[0] if episode.traces else None
    if trace is None or not episode.ok:
        raise SystemExit(f"the episode failed: {[error.message for error in episode.errors]}")
    common.note(last=trace.last_reply)
    common.reward(trace.reward)


if __name__ == "__main__":
    asyncio.run(main())
