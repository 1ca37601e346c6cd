"""Times of tools: which calls and results belong together, and their share of the episode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_dppo.run.run_records import rollout_metrics
from megatron_dppo.types import Rollout, RolloutGroup
from megatron_dppo_agents import tool_clock
from megatron_dppo_agents.runner import AgentTask
from megatron_dppo_agents.tool_clock import ToolClock
from test_agent_protocols import send
from tests.unit.scripted import CALL, TASK, TOOLS, World

ASK = "<|im_start|>assistant\n"
SECONDS = 0.4


def calls(**names: str) -> list[dict[str, Any]]:
    return [{"id": call_id, "function": {"name": name}} for call_id, name in names.items()]


def results(*ids: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]


def test_spans_by_response_and_their_union(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tool_clock.time, "monotonic", lambda: now[0])
    clock = ToolClock()
    history = [{"role": "assistant", "content": ""}]
    now[0] = 101
    clock.begin_tools(0, calls(a="add", b="search"))
    now[0] = 102
    clock.begin_tools(1, calls(c="add"))
    # Both results of the first response, in the other order; then the same ones again, within the history.
    clock.end_tools([*history, *results("b", "a")], 104.0)
    clock.end_tools([*history, *results("b", "a"), *history, *results("c", "unknown")], 107.0)
    # An id may occur twice in an episode. A result of the history is that of the earlier call.
    clock.begin_tools(2, calls(a="add"))
    clock.end_tools([*results("a"), *history], 108.0)
    spans = [(span.order, span.tools, span.seconds) for span in clock.spans]
    assert spans == [(0, ("search", "add"), 3.0), (1, ("add",), 5.0)]
    # From 101 to 104 and from 102 to 107, of 10 seconds. The last call has no result.
    now[0] = 110
    assert clock.metrics() == {"agent/tool_seconds": 6.0, "agent/tool_fraction": 0.6}


def test_an_episode_has_the_times_at_the_responses_that_called(world: World) -> None:
    """The second call forgets the history, so that the results stand in another segment than the call."""
    world.script = {f"3</tool_response><|im_end|>\n{ASK}": "It is 3", f"Again<|im_end|>\n{ASK}": CALL, ASK: CALL}

    async def agent(task: AgentTask) -> None:
        for question in ("1+2", "Again"):
            messages: list[Any] = [{"role": "user", "content": question}]
            body = {"messages": messages, "tools": TOOLS}
            answer = (await send(task, "/v1/chat/completions", body))[1]["choices"][0]["message"]
            await asyncio.sleep(SECONDS)
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
            if question == "Again":
                messages[0] = {"role": "user", "content": "A summary"}
            messages += [answer, result]
            assert (await send(task, "/v1/chat/completions", body))[0] == 200

    episode = world.play(agent, 2000)
    assert episode.counts["agent/segments"] == 3 and len(episode.tool_times) == 2
    tokens = episode.token_ids.tolist()
    for each in episode.tool_times:
        assert each.tools == ("add",) and SECONDS <= each.seconds < 20 * SECONDS
        assert world.tokenizer.decode(tokens[: each.position + 1]).endswith(f"{CALL}<|im_end|>")
    assert [len(segment.tool_times) for segment in episode.segments] == [1, 1, 0]
    assert episode.segments[1].tool_times[0].position == episode.segment_lengths[1] - 1
    seconds = sum(each.seconds for each in episode.tool_times)
    assert episode.counts["agent/tool_seconds"] == pytest.approx(seconds)
    share = episode.counts["agent/tool_fraction"]
    assert 0 < share < 1
    silent = world.play(ask_once, 2000)
    assert silent.counts["agent/tool_fraction"] == 0 == len(silent.tool_times)
    rollouts = tuple(Rollout(prompt=TASK, completion=each, reward=0.0) for each in (episode, silent))
    metrics = rollout_metrics([RolloutGroup(prompt=TASK, rollouts=rollouts)], [])
    mean, largest = metrics["agent/tool_fraction"], metrics["agent/tool_fraction_max"]
    assert (mean.numerator / mean.denominator, largest.numerator) == (share / 2, share) and largest.kind == "max"


async def ask_once(task: AgentTask) -> None:
    await send(task, "/v1/chat/completions", {"messages": [{"role": "user", "content": "1+2"}], "tools": TOOLS})
