"""The section ``[agent]``: a program that makes responses by calls to an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section


class AgentConfig(Section):
    """An agent that plays each episode (one sample of one prompt) against the policy (docs/agents.md)."""

    command: list[str] | None = None
    """The program and its arguments, started once an episode with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in the
    environment and the task as JSON on its standard input; None = no agent, or ``function``."""
    function: str | None = None
    """``module:function`` or ``path/to/file.py:function`` instead of a program: called with the task in the trainer's
    process, ``async`` or in a thread."""
    reward: Literal["function", "call", "exit"] = "function"
    """Where rewards come from. ``function``: [reward], where the agent has not called ``POST /v1/reward``; ``call``:
    that call, and an episode without one has failed; ``exit``: 1 where the program ends with status 0, else 0, or the
    number that the function returns."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Of an episode, without what it waits for the policy; then the program is killed, and the sample has failed."""
    max_calls: int = Field(50, gt=0)
    """Calls of an episode; further ones are refused, and the episode counts as cut off."""
    max_running: int | None = Field(None, gt=0)
    """Episodes at the same time on one data-parallel rank, with servers; None = all that are sampled."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens at, and is named by: another one only for agents outside of this machine."""
    max_body_bytes: int = Field(4_194_304, gt=0)
    """Longest body of a call."""

    @property
    def is_set(self) -> bool:
        """Whether there is an agent."""
        return self.command is not None or self.function is not None

    @model_validator(mode="after")
    def _is_one(self) -> AgentConfig:
        if self.command is not None and self.function is not None:
            raise ValueError("agent.command and agent.function are both set; choose one of them")
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError(f"agent.command = {self.command!r} names no program; e.g. ['python', 'my_agent.py']")
        changed = self.changed()
        if changed and not self.is_set:
            raise ValueError(
                f"agent.{changed[0]} = {getattr(self, changed[0])!r} has no effect without an agent; set "
                "agent.command or agent.function"
            )
        return self
