"""An environment of verifiers with three agents: two players of one game, and a judge that does not train."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]
HARNESS = {"id": "vf_sums"}


class DuelTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """One game."""

    def load(self) -> Iterable[vf.Task]:
        """Yield the task."""
        yield vf.Task(vf.TaskData(name="bid", prompt="bid"))


class DuelConfig(vf.EnvConfig):
    """The agents; their names are those of the fields."""

    first: vf.AgentConfig = vf.AgentConfig(harness=HARNESS)
    second: vf.AgentConfig = vf.AgentConfig(harness=HARNESS)
    judge: vf.AgentConfig = vf.AgentConfig(harness=HARNESS)
    max_concurrent_agents: int | None = None


class DuelEnv(vf.Env[DuelConfig]):
    """The players bid at the same time and in the same words, and say why. The judge names the winner."""

    async def setup(self, agents: vf.Agents) -> None:
        """Leave the judge out of training."""
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let both bid and say why, and the judge decide."""
        bids = await asyncio.gather(agents.first.run(task), agents.second.run(task))
        await agents.first.run(vf.Task(vf.TaskData(prompt="first, why?")))
        await agents.second.run(vf.Task(vf.TaskData(prompt="second, why?")))
        question = " or ".join(trace.last_reply for trace in bids)
        await agents.judge.run(vf.Task(vf.TaskData(prompt=question)))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Reward the bids with 1 and -1, and the winner's reason with 0.5."""
        runs = episode.by_agent
        (verdict,) = runs["judge"]
        for name in ("first", "second"):
            has_won = verdict.last_reply == name
            bid, reason = runs[name]
            bid.record_reward("win", 1.0 if has_won else -1.0)
            reason.record_reward("reason", 0.5 if has_won else 0.0)
            bid.record_metric("length", float(len(bid.last_reply)))
