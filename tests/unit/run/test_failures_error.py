"""The error of a step in which too many rewards or agents failed."""

from __future__ import annotations

import pytest

from megatron_dppo.run.run_records import first_agent_error
from megatron_dppo.run.save_plan import failures_error
from tests.unit.configs import config


@pytest.mark.parametrize(
    ("rewards", "agents", "limit", "words"),
    [
        (0.0, 0.0, 0.1, ""),
        (0.25, 0.25, 0.5, ""),
        (0.25, 0.0625, 0.1, "4 failed, more than reward.max_failed_fraction = 0.1"),
        (0.25, 0.25, 0.1, "4 failed, more than agent.max_failed_fraction = 0.1"),
        (0.0625, 0.0625, 0.0, ""),  # a single one of 16
        (0.125, 0.125, 0.0, "agent.max_failed_fraction = 0"),
    ],
)
def test_failed_agents_and_failed_rewards_have_limits_of_their_own(
    rewards: float, agents: float, limit: float, words: str
) -> None:
    settings = config(
        agent={"command": ["true"], "max_failed_fraction": limit},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4},
    )
    metrics = {"rollout/reward_failed_fraction": rewards, "rollout/agent/failed_fraction": agents}
    error = failures_error(4, metrics, settings.rollout, settings.agent, settings.reward)
    assert (error is None) == (words == "") and words in str(error or "")


def test_without_failed_episodes_there_is_no_error_and_no_communication() -> None:
    assert first_agent_error([], 0.0, None) == "" and first_agent_error([], 0.5, None) == ""
