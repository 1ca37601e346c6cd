"""Agents that are plain functions: each episode has a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron_dppo_agents.runner import AgentExit, AgentTask, FunctionAgent

NUM_EPISODES = 40
"""More than the threads of any default pool (``min(32, cores + 4)``)."""
PATIENCE = 20.0
TASK = AgentTask(prompt="", messages=[], label="", metadata={}, base_url="", api_key="sk-secret")


def play(function: Callable[[AgentTask], Any], count: int = 1) -> list[AgentExit]:
    agent = FunctionAgent(function)

    async def run() -> list[AgentExit]:
        return await asyncio.gather(*(agent.run(TASK) for _ in range(count)))

    return asyncio.run(run())


def test_all_episodes_of_a_step_run_at_once() -> None:
    """An episode in lockstep waits for the turns of all, so one without a thread would hold up every episode."""
    together = threading.Barrier(NUM_EPISODES)
    assert {result.value for result in play(lambda task: together.wait(PATIENCE), NUM_EPISODES)} == set(
        range(NUM_EPISODES)
    )


def test_a_function_sees_the_context_of_its_caller() -> None:
    """As ``asyncio.to_thread`` does: tracing libraries depend on it."""
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert [result.value for result in play(lambda task: variable.get(), 2)] == [7, 7]


def test_a_canceled_episode_leaves_its_thread_behind() -> None:
    """The event loop closes, and the process may exit, while the function still waits."""
    is_released = threading.Event()
    has_ended = threading.Event()
    threads: list[threading.Thread] = []

    def hang(task: AgentTask) -> None:
        threads.append(threading.current_thread())
        is_released.wait(PATIENCE)
        has_ended.set()

    async def cancel() -> None:
        episode = asyncio.create_task(FunctionAgent(hang).run(TASK))
        while not threads:
            await asyncio.sleep(0.01)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)

    asyncio.run(cancel())
    assert not has_ended.is_set() and threads[0].daemon
    is_released.set()
    threads[0].join(PATIENCE)
    assert has_ended.is_set(), "a result that nobody waits for is no error"


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("bad sk-secret"), "ValueError: bad ***"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(4), "RuntimeError: StopIteration: 4"),
    ],
)
def test_whatever_a_function_raises_is_the_failure_of_its_episode(error: BaseException, failure: str) -> None:
    def fail(task: AgentTask) -> None:
        raise error

    assert play(fail) == [AgentExit(None, failure)]
