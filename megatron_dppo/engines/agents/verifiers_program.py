"""The process of ``agent.environment = "verifiers:TASKSET"``: an environment of verifiers 0.4 plays episodes.

It is run by a Python of its own, which has verifiers and not this package. Each line of its input is a JSON object:

    {"options": {...}}                        fields of the environment's configuration, as the first line
    {"tasks": true}                           asks for all tasks
    {"id": 1, "task": KEY, "base_url": URL, "api_key": KEY}    begins an episode
    {"cancel": 1}                             cancels it

Each line of standard output is one, too:

    {"ready": NUMBER_OF_TASKS}                answers the first line
    {"error": TEXT}                           answers the first line; the process then ends
    {"tasks": [{"task": KEY, "prompt": TEXT, ...}, ...]}
    {"id": 1, "reward": 1.0, "rewards": {NAME: NUMBER}, "metrics": {NAME: NUMBER}, "failure": TEXT}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

_KEY = "MEGATRON_DPPO_API_KEY_"
"""Start of the variables with the keys of episodes. verifiers keeps names with API_KEY from the programs it starts."""
Send = Callable[[Mapping[str, Any]], None]


def open_environment(options: Mapping[str, Any]) -> Any:
    """Return the environment.

    Args:
        options: Fields of the configuration, whose class the taskset may define. ``taskset.id`` names the taskset.

    Raises:
        ValueError: The environment has several agents, or endless tasks.
    """
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    env_class = environment_class(options["taskset"]["id"], options.get("id", ""))
    config_class = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    seats = [name for name, field in config_class.model_fields.items() if field.annotation is vf.AgentConfig]
    if len(seats) != 1:
        raise ValueError(f"the environment {env_class.__name__} has the agents {seats}; one agent is supported")
    agent = dict(options.get(seats[0], {}))
    # The default of verifiers is a service in the cloud.
    agent.setdefault("runtime", {"type": "subprocess"})
    environment = load_environment(config_class.model_validate({**options, seats[0]: agent}))
    if not environment.taskset.bounded:
        raise ValueError("the taskset has endless tasks; expected a finite number of them")
    return environment


def task_row(key: str, task: Any) -> dict[str, Any]:
    """Return a task as a row of data: its key, its prompt as text, and its name."""
    prompt = task.data.prompt
    if isinstance(prompt, list):
        last = prompt[-1]
        content = last.get("content") if isinstance(last, dict) else getattr(last, "content", "")
        prompt = content if isinstance(content, str) else ""
    return {"task": key, "prompt": prompt or task.data.name or key, "label": "", "name": task.data.name or ""}


async def play(environment: Any, task: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Play one episode, and return its rewards, metrics, and failure (empty if there is none)."""
    import verifiers.v1 as vf

    variable = f"{_KEY}{call['id']}"
    os.environ[variable] = call["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=call["base_url"], api_key_var=variable)
        context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling())
        episode = await environment.run_episode(task, context)
    finally:
        del os.environ[variable]
    trace = episode.traces[0] if episode.traces else None
    errors = [*episode.errors, *(trace.errors if trace is not None else [])]
    failure = "" if episode.ok else "; ".join(f"{each.type}: {each.message}" for each in errors) or "it failed"
    if trace is None:
        return {"id": call["id"], "reward": None, "rewards": {}, "metrics": {}, "failure": failure}
    return {
        "id": call["id"],
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "failure": failure,
    }


async def serve(lines: asyncio.StreamReader, send: Send) -> None:
    """Answer the lines until standard input ends."""
    try:
        environment = open_environment(json.loads(await lines.readline())["options"])
        tasks = {task.key: task for task in environment.taskset}
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    episodes: dict[int, asyncio.Task[None]] = {}

    async def episode(call: Mapping[str, Any]) -> None:
        try:
            if call["task"] not in tasks:
                raise ValueError(f"the taskset has no task {call['task']!r}; write the rows of data.train anew")
            reply = await play(environment, tasks[call["task"]], call)
        except Exception as error:
            reply = {"id": call["id"], "reward": None, "rewards": {}, "metrics": {}}
            reply["failure"] = f"{type(error).__name__}: {error}"
        finally:
            del episodes[call["id"]]
        send(reply)

    async with environment.serving():
        send({"ready": len(tasks)})
        while line := await lines.readline():
            call = json.loads(line)
            if "tasks" in call:
                send({"tasks": [task_row(key, task) for key, task in tasks.items()]})
            elif "cancel" in call:
                if call["cancel"] in episodes:
                    episodes[call["cancel"]].cancel()
            else:
                episodes[call["id"]] = asyncio.create_task(episode(call))
        for each in [*episodes.values()]:
            each.cancel()
        await asyncio.gather(*episodes.values(), return_exceptions=True)


async def main() -> None:
    """Connect the standard streams and serve."""
    # What libraries and environments print must not end up between the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")

    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await serve(lines, send)


if __name__ == "__main__":
    asyncio.run(main())
