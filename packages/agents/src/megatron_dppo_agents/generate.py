"""Generate function of ``[agent]``: responses from the calls of an agent, for any engine (``rollout/turns.py``)."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_dppo.config.container import CONTAINER_TOOLS
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import FunctionError, GenerateError
from megatron_dppo.functions import check_arguments, load_function
from megatron_dppo.rollout.turns import Turns, check_reward
from megatron_dppo.types import Completion, Prompt
from megatron_dppo_agents.containers import ContainerAgent
from megatron_dppo_agents.endpoint import Endpoint
from megatron_dppo_agents.environment import EnvironmentAgent
from megatron_dppo_agents.episode import Episode, EpisodeSettings
from megatron_dppo_agents.launcher import landlock_version
from megatron_dppo_agents.named_rewards import NamedRewards
from megatron_dppo_agents.renderer_reader import RendererReader, import_renderers, load_renderer
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_agents.runner import (
    Agent,
    AgentExit,
    AgentTask,
    AgentTimeout,
    FunctionAgent,
    ProgramAgent,
    isolated_command,
    run_with_time_limit,
)
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.formats import choose_format

_NO_LANDLOCK = (
    "agent.isolation: Landlock is unavailable (Linux 5.13 or newer, not disabled by the container), so a "
    "program could read the keys of other episodes. Use such a kernel, or set agent.isolation = 'none': programs then "
    "take api_key from the task on their standard input, and are not kept from each other"
)
_NUM_THREADS = 2
"""Number of threads that parse, render and tokenize the calls of all episodes."""
MAX_FAILURES = 64
"""Failed episodes in a row after which the agent itself counts as broken."""


class AgentFunction:
    """Generate function that runs the agent of ``[agent]``; ``close`` it at the end.

    Args:
        now: Returns the date that the chat template sees. Called once, for the first episode.
        run_folder: Folder of the run, by which its containers are known.

    Raises:
        GenerateError: The program does not exist or cannot be isolated, or the function cannot be used.
    """

    __name__ = "[agent]"

    def __init__(
        self,
        config: AgentConfig,
        variables: Mapping[str, Any],
        now: Callable[[], datetime] = datetime.now,
        *,
        part_weights: Mapping[str, float] | None = None,
        run_folder: Path = Path(),
    ) -> None:
        self._config = config
        self._variables = variables
        self._now = now
        self.agent: Agent
        if config.function is not None:
            self.agent = FunctionAgent(_load_function(config))
        else:
            self.agent = _load_program(config, run_folder)
        if config.renderer is not None:
            import_renderers(config.renderer)
        network = self.agent.network if isinstance(self.agent, ContainerAgent) else None
        self._endpoint = Endpoint(config.host, config.max_body_bytes, network)
        self._executor = ThreadPoolExecutor(_NUM_THREADS, "agent-calls")
        self._settings = EpisodeSettings(
            max_calls=config.max_calls,
            max_segments=config.max_segments,
            segments=config.segments,
            credit=config.credit,
            untrained_prompts=tuple(config.untrained_prompts),
            rewards=NamedRewards(part_weights or {}),
        )
        self._template: ChatTemplate | None = None
        self._reader: ResponseReader | None = None
        self._failures = 0
        """Failed episodes in a row."""
        self._slots = nullcontext() if config.max_running is None else asyncio.Semaphore(config.max_running)

    def close(self) -> None:
        """Stop listening, end an environment and remove containers."""
        if isinstance(self.agent, EnvironmentAgent | ContainerAgent):
            self.agent.close()
        self._endpoint.close()
        self._executor.shutdown(cancel_futures=True)

    async def __call__(self, prompt: Prompt, turns: Turns) -> Completion:
        """Run one episode.

        Raises:
            ServerError: No server responded.
            GenerateError: The endpoint cannot listen, or too many episodes failed in a row.
        """
        # The tokenizer comes with the first episode.
        if self._template is None or self._reader is None:
            tokenizer = turns.tokenizer
            response_format = choose_format(tokenizer.chat_template, self._config.format)
            needs_text = response_format.needs_text_arguments
            self._template = ChatTemplate(tokenizer, self._variables, self._now(), has_text_arguments=needs_text)
            separates = self._config.separate_reasoning
            if self._config.renderer is not None:
                renderer = load_renderer(self._config.renderer, tokenizer)
                self._reader = RendererReader(tokenizer, renderer, separates_reasoning=separates)
            else:
                self._reader = ResponseReader(tokenizer, response_format, separates_reasoning=separates)
        if isinstance(self.agent, EnvironmentAgent | ContainerAgent):
            await self.agent.start()
        async with self._slots:
            episode = Episode(turns, self._template, self._reader, self._episode_settings(prompt), self._executor)
            episode.takes_reward = self._config.reward == "call"
            try:
                agent_exit = await self._run_episode(prompt, episode)
            finally:
                episode.calls.close()
            failure = self._failure(agent_exit, episode)
            completion = await episode.finish(failure, agent_exit.counts)
        self._failures = self._failures + 1 if completion.failure else 0
        if self._failures == MAX_FAILURES:
            raise GenerateError(
                f"{MAX_FAILURES} episodes of the agent failed one after the other; the last: {completion.failure}"
            )
        return completion

    async def _run_episode(self, prompt: Prompt, episode: Episode) -> AgentExit:
        try:
            key = self._endpoint.register(episode)
        except OSError as error:
            raise GenerateError(f"agent.host = {self._config.host!r}: cannot listen there: {error}") from error
        task = AgentTask(
            prompt=str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text,
            messages=list(prompt.messages or ()),
            label=prompt.label,
            metadata=prompt.metadata,
            base_url=self._endpoint.base_url,
            api_key=key,
        )
        source_limit = None if prompt.limits is None else prompt.limits.timeout_seconds
        seconds = source_limit or self._config.timeout_seconds
        try:
            return await run_with_time_limit(self.agent.run(task), episode, seconds)
        except AgentTimeout:
            limit = f"took longer than {prompt.limit_key('agent.timeout_seconds')} = {seconds:g}"
            return AgentExit(None, limit, has_timed_out=True)
        finally:
            self._endpoint.unregister(key)

    def _episode_settings(self, prompt: Prompt) -> EpisodeSettings:
        """Return the settings of an episode, with the limits of the prompt's source."""
        limits = prompt.limits
        if limits is None:
            return self._settings
        return replace(
            self._settings,
            max_calls=limits.max_calls or self._settings.max_calls,
            max_segments=limits.max_segments or self._settings.max_segments,
        )

    def _failure(self, agent_exit: AgentExit, episode: Episode) -> str:
        """Give the episode the reward of the agent's end, and return the failure, which is empty if there is none.

        A program that exits with an error after its token or call budget was used up has not failed.
        """
        if agent_exit.runs:
            episode.set_runs(agent_exit.runs)
        source = self._config.reward
        has_parts = bool(self._settings.rewards.weights)
        has_failed = bool(agent_exit.failure) and (agent_exit.has_timed_out or not episode.is_cut_off)
        # Of a program, an exit status other than 0 is the reward 0 and no failure. It has no parts, however.
        is_exit_status = source == "exit" and not has_parts and agent_exit.value is not None
        if has_failed and not is_exit_status:
            return agent_exit.failure
        if source == "call" and episode.reward is None:
            return f"the agent ended without POST /v1/reward {self._settings.rewards.form}"
        if self._config.environment is not None and not agent_exit.runs:
            return agent_exit.failure or "the environment ran no agent"
        if source in ("exit", "environment"):
            try:
                self._take_reward(agent_exit, episode)
            except (TypeError, ValueError) as error:
                return agent_exit.failure or f"the reward of {_agent_name(self._config)}: {error}"
        return ""

    def _take_reward(self, agent_exit: AgentExit, episode: Episode) -> None:
        rewards = self._settings.rewards
        value = episode.run_reward if agent_exit.runs else agent_exit.value
        if not rewards.weights and not isinstance(value, Mapping):
            episode.add_reward(check_reward(value))
            return
        value = value if agent_exit.parts is None else agent_exit.parts
        if not isinstance(value, Mapping) or list(value) != ["rewards"]:
            raise ValueError(f"expected {rewards.form} (reward.agent_parts), got {value!r:.200}")
        episode.add_rewards(rewards.read(value["rewards"]))


def _agent_name(config: AgentConfig) -> str:
    if config.function is not None:
        return "agent.function"
    return "agent.environment" if config.environment is not None else "agent.command"


def _load_program(config: AgentConfig, run_folder: Path) -> Agent:
    if config.isolation in CONTAINER_TOOLS:
        assert config.command is not None
        return ContainerAgent(config.command, config, run_folder)
    if config.isolation != "none" and landlock_version() < 1:
        raise GenerateError(_NO_LANDLOCK)
    if config.isolation == "namespace":
        _check_namespace(config)
    setting, program = f"agent.command = {config.command!r}", (config.command or [""])[0]
    if config.environment is not None:
        setting, program = "agent.environment_python", str(config.environment_python)
    if shutil.which(program) is None:
        raise GenerateError(
            f"{setting}: there is no program {program!r} that can be executed; give its path, or put it in PATH"
        )
    if config.command is None:
        return EnvironmentAgent(config)
    return ProgramAgent(config.command, config)


def _check_namespace(config: AgentConfig) -> None:
    # The limits are those of the agent's program, not of this one.
    unlimited = config.model_copy(update={"max_memory_gb": None, "max_cpu_seconds": None})
    done = subprocess.run(isolated_command(["true"], unlimited), capture_output=True, text=True, check=False)
    if done.returncode:
        raise GenerateError(
            f"agent.isolation = 'namespace': {done.stderr.strip()[-200:]}. The kernel or a container forbids "
            "namespaces of users and processes, or a mount of /proc. Allow them, or set agent.isolation = 'landlock'"
        )


def _load_function(config: AgentConfig) -> Any:
    assert config.function is not None
    try:
        function = load_function(config.function, "agent.function")
        check_arguments(function, config.function, "agent.function", ["task"], {})
    except FunctionError as error:
        raise GenerateError(str(error)) from error
    return function
