"""Agent episodes that outlive their step: carried with older tokens, killed, and resumed bit for bit."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from megatron_dppo.types import DropReason
from tests.e2e.bases import chain_sum_base
from tests.e2e.recorded import rows_of
from tests.e2e.runs import CONFIG, flags, step_records, train
from tests.e2e.test_resume import assert_same_run

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 5
PROMPTS = 4
"""Prompts of a step."""
WEIGHTS = {"long": 1.0, "short": 2.0}

AGENT = '''
import os
import signal
from pathlib import Path

import aiohttp


async def run(task):
    """One call for short rows; for long ones four, two in each of two segments."""
    kill_after = os.environ.get("KILL_AFTER")
    text = ""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        for call in range(task.metadata["calls"]):
            if call == 2 and kill_after and Path(kill_after).exists():
                os.kill(os.getpid(), signal.SIGKILL)
            prompt = task.prompt + f"{call}=" if call % 2 == 0 else text + "+"
            body = {"prompt": prompt, "max_tokens": 6, "stop": ["1"]}
            async with session.post(f"{task.base_url}/completions", json=body) as response:
                response.raise_for_status()
                # With the stop string, which the response of the endpoint leaves out.
                choice = (await response.json())["choices"][0]
            text = prompt + choice["text"] + "1" * (choice["finish_reason"] == "stop")
    return sum(map(ord, text)) % 7 / 7
'''


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_is_killed_with_carried_episodes_continues_bit_for_bit(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two sources, of which one has long episodes. With staleness a step's episodes begin one step earlier."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    for name, calls, numbers in (("long", 4, range(10, 27)), ("short", 1, range(30, 64))):
        rows = [{"prompt": f"{n}+", "label": "", "calls": calls} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = "".join(f'\n[data.sources."{name}.jsonl"]\nweight = {weight}\n' for name, weight in WEIGHTS.items())
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.read_text() + sources)
    arguments = flags(
        data__train=json.dumps([str(tmp_path / f"{name}.jsonl") for name in WEIGHTS]),
        data__label_key="label",
        model__path=chain_sum_base(2),
        train__max_staleness=staleness,
        agent__function=f"{tmp_path}/my_agent.py:run",
        agent__reward="exit",
        parallel__expert_model_parallel_size=1,
        run__num_steps=STEPS,
        rollout__prompts_per_step=PROMPTS,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=64,
        rollout__oversample=1.5,
        rollout__abort_slowest="true",
        rollout__partial_rollouts=2,
        eval__every=0,
        checkpoint__save_every=1,
        checkpoint__keep=STEPS,
        log__rollouts_every=1,
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train([*arguments, *flags(run__output_dir=whole)], config=config)
    assert result.returncode == 0, result.stdout + result.stderr

    # The run is killed while carried episodes are played again.
    carried_step = 2
    monkeypatch.setenv("KILL_AFTER", str(killed / f"checkpoints/step_{carried_step:06}"))
    arguments += flags(run__output_dir=killed)
    assert train(arguments, config=config).returncode == -signal.SIGKILL
    assert len(step_records(killed)) == carried_step and carried(killed, carried_step)
    monkeypatch.delenv("KILL_AFTER")
    result = train(arguments, config=config)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"(step {carried_step}, " in result.stdout

    assert_same_run(killed, whole)
    for step in range(1, STEPS + 1):
        assert rows_of(killed, step).to_json() == rows_of(whole, step).to_json(), f"step {step}, bit for bit"
    check_nothing_is_lost(killed, staleness)


def carried(folder: Path, step: int) -> list[int]:
    """Positions of the prompts that a checkpoint carries to the next step, submitted for it or not."""
    state = json.loads((folder / f"checkpoints/step_{step:06}/state.json").read_text())["stream"]
    waiting = [slot[0] for slots in state["waiting"] for slot in slots]
    submissions = [each for rank in state["draws"] for each in rank]
    return waiting + [slot[0] for each in submissions for slot in each["places"] if slot[1] < each["step"]]


def check_nothing_is_lost(folder: Path, staleness: int) -> None:
    """Each prompt of the stream is trained on once, counted as dropped, or still carried."""
    steps = step_records(folder)
    counts = [step["rollout/carried_groups"] for step in steps]
    assert counts == [len(carried(folder, step)) for step in range(1, STEPS + 1)] and sum(counts) > 1
    oldest = max(step["rollout/policy_age_max"] for step in steps)
    assert oldest > staleness, "carried tokens are older than the staleness of episodes that are not carried"
    shares = [[step[f"rollout/source/{name}.jsonl/fraction"] for name in WEIGHTS] for step in steps]
    assert all(map(any, zip(*shares, strict=True))) and all(sum(each) == 1 for each in shares)
    assert all(step["rollout/agent/failed_fraction"] == 0 for step in steps)
    assert any(step["rollout/agent/untrained/after_stop"] > 0 for step in steps)
    assert all(step["rollout/agent/untrained/not_repeated"] == 0 for step in steps)
    trained = Counter(prompt for step in range(1, STEPS + 1) for prompt in set(rows_of(folder, step).prompt_id))
    assert set(trained.values()) == {1} and len(trained) == STEPS * PROMPTS
    dropped = sum(step[f"rollout/dropped_groups/{reason}"] for step in steps for reason in DropReason)
    cursor = json.loads((folder / f"checkpoints/step_{STEPS:06}/state.json").read_text())["stream"]["cursor"]
    assert cursor == len(trained) + dropped + counts[-1]
