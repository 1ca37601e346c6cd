"""The process of ``agent.environment = "verifiers:TASKSET"``: an environment of verifiers 0.4 plays episodes.

It is run by a Python of its own, which has verifiers and not this package. Each line of its input is a JSON object:

    {"options": {...}, "untrained_agents": [NAME, ...]}    the first line: fields of the environment's configuration
    {"tasks": true}                           asks for all tasks
    {"id": 1, "task": KEY, "base_url": URL, "api_key": KEY}    begins an episode
    {"cancel": 1}                             cancels it

Each line of standard output is one, too:

    {"ready": NUMBER_OF_TASKS}                answers the first line
    {"error": TEXT}                           answers the first line; the process then ends
    {"tasks": [{"task": KEY, "prompt": TEXT, ...}, ...]}
    {"id": 1, "runs": [RUN, ...], "rewards": {NAME: NUMBER}, "metrics": {NAME: NUMBER}, "failure": TEXT}

A run is what an agent did in the episode, a "trace" of verifiers:

    {"session": ID, "agent": NAME, "is_trained": true, "reward": 1.0}
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

_KEY = "MEGATRON_DPPO_API_KEY_"
"""Start of the variables with the keys of episodes. verifiers keeps names with API_KEY from the programs it starts."""
Send = Callable[[Mapping[str, Any]], None]


def open_environment(options: Mapping[str, Any], untrained_agents: Collection[str]) -> Any:
    """Return the environment. ``taskset.id`` of the options names a taskset, which may define their class."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    env_class = environment_class(options["taskset"]["id"], options.get("id", ""))
    config_class = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    # The field of an agent has a configuration as its default, and its name is that of the agent.
    agents = {name: field.default for name, field in config_class.model_fields.items()}
    agents = {name: default for name, default in agents.items() if isinstance(default, vf.AgentConfig)}
    if unknown := set(untrained_agents) - set(agents):
        raise ValueError(
            f"agent.untrained_agents has {sorted(unknown)}; the environment {env_class.__name__} has the agents "
            f"{list(agents)}"
        )
    settings = {name: dict(options.get(name, {})) for name in agents}
    for name, default in agents.items():
        # The default of verifiers is a service in the cloud.
        if "runtime" not in default.model_fields_set:
            settings[name].setdefault("runtime", {"type": "subprocess"})
    environment = load_environment(config_class.model_validate({**options, **settings}))
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


async def play(
    environment: Any, task: Any, call: Mapping[str, Any], untrained_agents: Collection[str]
) -> dict[str, Any]:
    """Play one episode, and return its runs, rewards, metrics, and failure (empty if there is none)."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    # Also those of runs that an error of another agent ends, which the episode lacks.
    traces: list[Any] = []
    variable = f"{_KEY}{call['id']}"
    os.environ[variable] = call["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=call["base_url"], api_key_var=variable)
        context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling())
        episode = await environment.run_episode(task, context, on_trace=traces.append, on_discard=traces.remove)
    finally:
        del os.environ[variable]
    is_complete = environment.complete(episode)
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    failure = "" if is_complete else "; ".join(f"{each.type}: {each.message}" for each in errors) or "it failed"
    # With several agents names are AGENT.NAME.
    prefixes = {name: f"{name}." for name in agent_config_fields(environment.config)}
    if len(prefixes) == 1:
        prefixes = dict.fromkeys(prefixes, "")
    scores, metrics = [], []
    for trace in traces:
        prefix = prefixes[trace.agent.name]
        scores += [(f"{prefix}{name}", reward.score) for name, reward in trace.rewards.items() if reward is not None]
        metrics += [(f"{prefix}{name}", value) for name, value in trace.metrics.items() if value is not None]
    return {
        "id": call["id"],
        "runs": [
            {
                "session": trace.id,
                "agent": trace.agent.name,
                # A run that failed in an episode that is complete without it.
                "is_trained": trace.agent.trainable
                and trace.agent.name not in untrained_agents
                and (trace.ok or not is_complete),
                "reward": trace.reward,
            }
            for trace in traces
        ],
        "rewards": mean_by_name(scores),
        "metrics": mean_by_name(metrics),
        "failure": failure,
    }


def mean_by_name(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of the values of each name."""
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in by_name.items()}


async def serve(lines: asyncio.StreamReader, send: Send) -> None:
    """Answer the lines until standard input ends."""
    try:
        first = json.loads(await lines.readline())
        untrained_agents = first["untrained_agents"]
        environment = open_environment(first["options"], untrained_agents)
        tasks = {task.key: task for task in environment.taskset}
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    episodes: dict[int, asyncio.Task[None]] = {}

    async def episode(call: Mapping[str, Any]) -> None:
        try:
            if call["task"] not in tasks:
                raise ValueError(f"the taskset has no task {call['task']!r}; write the rows of data.train anew")
            reply = await play(environment, tasks[call["task"]], call, untrained_agents)
        except Exception as error:
            reply = {"id": call["id"], "runs": [], "rewards": {}, "metrics": {}}
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
