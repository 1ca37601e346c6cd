"""Episodes of agents in the report: turns by segment, failures by error, and shares over the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.report.console import format_step_line
from megatron_dppo.report.steps.files import StepMeta, write_step
from megatron_dppo.report.steps.rows import RankSamples, TrainedTokens
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, ToolTime
from megatron_dppo_report.agents import turns
from megatron_dppo_report.build import ReportedRun, build
from test_report_page import scripts
from tests.unit.recorded_run import decode

GIVEN = "gggssggsss" + "ggss"
"""Tokens of two segments of 10 and 4 tokens: given by the program, or sampled."""
SEGMENTS = (10, 4)
HOSTILE = "<script>window.hacked = 9</script> KeyError: 'x'\nTraceback"


def write_agent_run(folder: Path) -> Path:
    """Two recorded steps: an episode of two segments, a failed one, and a plain response."""
    folder.mkdir(parents=True)
    sampled = torch.tensor([letter == "s" for letter in GIVEN])
    prompt = Prompt(prompt_id="file:0", text="1+2", token_ids=(7,), label="3")
    episode = Completion(
        token_ids=torch.arange(6, 6 + len(GIVEN), dtype=torch.int32),
        logprobs=torch.where(sampled, -0.5, 0.0),
        finish_reason=FinishReason.STOP,
        policy_version=1,
        text="x",
        loss_mask=sampled,
        segment_lengths=SEGMENTS,
        tool_times=(ToolTime(4, 1.25, ("add", "search", "add")), ToolTime(13, 0.5, ("add",))),
    )
    failed = replace(episode, segment_lengths=(), tool_times=(), failure=HOSTILE)
    plain = replace(episode, segment_lengths=(), tool_times=(), loss_mask=None)
    rollouts = (
        Rollout(prompt=prompt, completion=episode, reward=1.5, reward_parts={"format": 1.0, "answer": 0.5}),
        Rollout(prompt=prompt, completion=failed, reward=0.0, reward_failed=True),
        Rollout(prompt=prompt, completion=plain, reward=1.0),
    )
    trained = []
    for rollout in rollouts:
        mask = rollout.completion.loss_mask
        mask = torch.ones(len(GIVEN), dtype=torch.bool) if mask is None else mask.clone()
        # One sampled token did not train.
        mask[4] = False
        trained.append(
            TrainedTokens(
                update=0,
                policy_version=3,
                loss_mask=mask,
                advantages=torch.where(mask, 0.5, 0.0),
                logprobs=torch.where(mask, -0.4, torch.nan),
                keep=mask,
            )
        )
    lines = []
    for step in (1, 2):
        part = RankSamples(
            dp_rank=0, groups=[RolloutGroup(prompt=prompt, rollouts=rollouts)], ages=[0], trained=trained
        )
        write_step(folder, StepMeta(step, 3, 1, 1, "1 rank", "dppo_binary_tv"), [part])
        agent = {"calls": 2.0, "failed_fraction": 0.25 * step, "untrained/after_stop": 0.125}
        record = {f"rollout/agent/{name}": value for name, value in agent.items()}
        lines.append(json.dumps({"step": step, "rollout/reward": 1.0, **record}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("given", "segments", "shown", "expected"),
    [
        ("ggss", (), (0, 4), [[0, 0, 0], [2, 1, 0]]),
        ("ssss", (), (0, 4), []),
        ("ssss", (2, 2), (0, 4), [[0, 1, 0], [2, 1, 1]]),
        (GIVEN, SEGMENTS, (0, 14), [[0, 0, 0], [3, 1, 0], [5, 0, 0], [7, 1, 0], [10, 0, 1], [12, 1, 1]]),
        (GIVEN, SEGMENTS, (4, 11), [[0, 1, 0], [1, 0, 0], [3, 1, 0], [6, 0, 1]]),
    ],
)
def test_turns_begin_where_tokens_are_given_or_a_segment_begins(
    given: str, segments: Any, shown: tuple[int, int], expected: list[list[int]]
) -> None:
    assert turns(np.array([letter == "g" for letter in given]), segments, *shown) == expected


def test_episodes_are_conversations_and_failures_are_counted(tmp_path: Path) -> None:
    run = write_agent_run(tmp_path / "run")
    data = scripts(build([ReportedRun(run, decode)]))
    by_sample = {response["sample"]: response for response in data["step-0-2"]["responses"]}
    episode, failed, plain = (by_sample[number] for number in range(3))
    assert (episode["segments"], len(episode["turns"])) == (2, 6) and episode["failure"] == ""
    assert episode["parts"] == [["format", 1.0], ["answer", 0.5]]
    assert episode["flags"] == "00010001110011", "given and untrained tokens are 0"
    assert (failed["segments"], failed["failure"]) == (1, HOSTILE) and len(failed["turns"]) == 6
    assert plain["turns"] == [] and plain["parts"] == [] and plain["toolTimes"] == []
    assert episode["toolTimes"] == [[4, 1.25, "add (2 calls), search"], [13, 0.5, "add"]]
    agents = data["data"]["runs"][0]["agents"]
    assert agents["failures"] == [[2, HOSTILE.split("\n")[0], "step 1, sample 1"]]
    assert agents["metrics"] == [
        ["episodes failed", 0.25, 0.5, 0.375],
        ["... behind a stop string", 0.125, 0.125, 0.125],
        ["calls answered, an episode", 2.0, 2.0, 2.0],
    ]


def test_the_step_line_names_tokens_behind_stop_strings() -> None:
    values = {"rollout/agent/untrained_fraction": 0.25, "rollout/agent/untrained/after_stop": 0.25}
    assert format_step_line(1, 2, values).endswith("agents untrained 25%: after_stop 25%")
