"""A run whose agent fails in some episodes: they are shown, and too many of them stop the run after a save."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.runs import flags, step_records, train

pytestmark = pytest.mark.e2e

AGENT = '''
import itertools

import aiohttp

numbers = itertools.count()


async def run(task):
    """Plays an episode of one call. Every second one fails."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        (await session.post(f"{task.base_url}/completions", json={"prompt": task.prompt})).raise_for_status()
    if next(numbers) % 2:
        raise RuntimeError("no\\x1b[2Jtool")
'''


def test_failed_episodes_are_shown_and_too_many_stop_the_run_after_a_save(short_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    result = train([*short_run, *flags(agent__function="my_agent:run")], extra_path=tmp_path)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "agents failed 50%: RuntimeError: no\\x1b[2Jtool" in result.stdout and "rewards failed" not in result.stdout
    assert "50% of the agent's episodes of step 1 failed, more than agent.max_failed_fraction = 0.1" in result.stderr
    (folder,) = [Path(value) for key, value in itertools.pairwise(short_run) if key == "--run.output_dir"]
    assert (folder / "checkpoints/step_000001").is_dir()
    (step,) = step_records(folder)
    assert step["rollout/agent/failed_fraction"] == step["rollout/reward_failed_fraction"] == 0.5
    # The advice of the message, from the state that it leaves.
    assert "Fix the agent and rerun the same command to resume, or raise the limit" in result.stderr
    (tmp_path / "my_agent.py").write_text(AGENT.replace("if next(numbers) % 2:", "if False:"))
    fixed = train([*short_run, *flags(agent__function="my_agent:run")], extra_path=tmp_path)
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr
    assert "changed, as its failures stopped the run: agent.function: the content of" in fixed.stdout
    assert [step["rollout/agent/failed_fraction"] for step in step_records(folder)] == [0.5, 0.0]
