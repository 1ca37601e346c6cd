"""An environment of verifiers 0.4: sums as tasks, and a program with a tool as the agent."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]
PROGRAM = Path(__file__).with_name("program.py")


class Sum(vf.TaskData):
    """One sum."""

    answer: str = ""


class SumTask(vf.Task[Sum]):
    """Right if the last response has the answer. Short responses count a little."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last number of the last response is the answer."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [self.data.answer])

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        """Return 1 for a last response of at most 20 characters."""
        return float(len(trace.last_reply) <= 20)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        """Return the number of responses."""
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    """Size of the taskset."""

    largest: int = 3


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """All sums of two numbers from 1 to ``largest``."""

    def load(self) -> Iterable[SumTask]:
        """Yield the tasks."""
        for a in range(1, self.config.largest + 1):
            for b in range(1, self.config.largest + 1):
                yield SumTask(Sum(name=f"{a}+{b}", prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


class SumsHarnessConfig(vf.HarnessConfig):
    """Nothing of its own."""


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    """Starts program.py, which knows nothing of verifiers."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Run the program with the prompt as its argument."""
        _, prompt = self.resolve_text_prompt(data)
        variables = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret, "OPENAI_MODEL": ctx.model}
        return await runtime.run([sys.executable, str(PROGRAM), prompt or ""], variables)
