"""The function that makes a response of what an agent does, for any engine (``rollout/turns.py``)."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.engines.agents.endpoint import Endpoint
from megatron_dppo.engines.agents.episode import Episode
from megatron_dppo.engines.agents.runner import Agent, AgentExit, AgentTask, AgentTooSlow, Function, Program, within
from megatron_dppo.engines.agents.template import ChatTemplate
from megatron_dppo.errors import FunctionError, GenerateError
from megatron_dppo.functions import check_arguments, load_function
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, Prompt

MOST_FAILURES = 64
"""Episodes that may fail one after the other: after that the agent itself is broken."""


class AgentFunction:
    """Makes responses by the agent of ``[agent]``; ``close`` it at the end.

    Args:
        config: the section.
        variables: of the chat template.
        hidden: environment variables that a program does not get.

    Raises:
        GenerateError: there is no such program, or the function cannot be used.
    """

    __name__ = "[agent]"

    def __init__(self, config: AgentConfig, variables: Mapping[str, Any], hidden: Collection[str] = ()) -> None:
        self._config, self._variables = config, variables
        self._agent: Agent = Program(config.command, hidden) if config.command else Function(_load(config))
        if config.command and shutil.which(config.command[0]) is None:
            raise GenerateError(
                f"agent.command = {config.command!r}: there is no program {config.command[0]!r} that can be executed; "
                "give its path, or put it in PATH"
            )
        self._endpoint = Endpoint(config.host, config.max_body_bytes)
        self._template: ChatTemplate | None = None
        self._failed, most = 0, config.max_running
        self._places = nullcontext() if most is None else asyncio.Semaphore(most)

    def close(self) -> None:
        """Stop listening."""
        self._endpoint.close()

    async def __call__(self, prompt: Prompt, turns: Turns) -> Completion:
        """Play one episode.

        Raises:
            ServerError: no server gave an answer.
            GenerateError: the endpoint cannot listen, or the agent fails again and again.
        """
        self._template = self._template or ChatTemplate(turns.tokenizer, self._variables)
        async with self._places:
            episode = Episode(turns, self._template, self._config.max_calls)
            try:
                ended = await self._play(prompt, episode)
            finally:
                episode.close()
            completion = await episode.finish(*self._judge(ended, episode))
        self._failed = self._failed + 1 if completion.failure else 0
        if self._failed == MOST_FAILURES:
            raise GenerateError(
                f"{MOST_FAILURES} episodes of the agent failed one after the other; the last: {completion.failure}"
            )
        return completion

    async def _play(self, prompt: Prompt, episode: Episode) -> AgentExit:
        try:
            key = self._endpoint.open(episode)
        except OSError as error:
            raise GenerateError(f"agent.host = {self._config.host!r} cannot be listened at: {error}") from error
        task = AgentTask(
            prompt=str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text,
            messages=list(prompt.messages or ()),
            label=prompt.label,
            metadata=prompt.metadata,
            base_url=self._endpoint.base_url,
            api_key=key,
        )
        try:
            return await within(self._agent.play(task), episode, self._config.timeout_seconds)
        except AgentTooSlow:
            limit = f"took longer than agent.timeout_seconds = {self._config.timeout_seconds:g}"
            return AgentExit(None, limit, too_slow=True)
        finally:
            self._endpoint.forget(key)

    def _judge(self, ended: AgentExit, episode: Episode) -> tuple[float | None, str]:
        """Reward and failure. A program that ends with an error since its budget was spent has not failed."""
        if self._config.reward == "exit":
            value = ended.value
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value), ""
            return None, ended.failure or f"agent.function returned {value!r:.200}, expected a finite number"
        if ended.failure and (ended.too_slow or not episode.cut_off):
            return None, ended.failure
        if self._config.reward == "call" and episode.reward is None:
            return None, "the agent ended without POST /v1/reward"
        return episode.reward, ""


def _load(config: AgentConfig) -> Any:
    assert config.function is not None
    try:
        function = load_function(config.function, "agent.function")
        check_arguments(function, config.function, "agent.function", ["task"], {})
    except FunctionError as error:
        raise GenerateError(str(error)) from error
    return function
