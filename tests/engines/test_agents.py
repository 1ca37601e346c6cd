"""Agents by frameworks of others: a tool loop, and a training run on a real server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import step_records, train
from tests.engines.inprocess import make_model
from tests.engines.proxy import Proxy
from tests.engines.runs import arguments, from_model
from tests.engines.servers import TOOLS, SharedEngine, start_sglang
from tests.engines.test_sampling_lies import Sampling
from tests.engines.tiny import make_tiny
from tests.unit.scripted import CALL, World, chat_tokenizer

FRAMEWORKS = ("with_openai", "with_openai_agents", "with_pydantic_ai")
ASK = "<|im_end|>\n<|im_start|>assistant\n"


def program(framework: str) -> str:
    return str(Path(__file__).parent / "agents" / f"{framework}.py")


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has the frameworks."""
    done = subprocess.run([TOOLS / "agents.sh", "install"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return f"{done.stdout.strip()}/bin/python"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tool_loop_and_a_second_question_form_one_sequence(framework: str, python: str, world: World) -> None:
    world.script = {f"1+2{ASK}": CALL, f"3</tool_response>{ASK}": "It is 3", f"Sure?{ASK}": "Yes, I am"}
    completion = world.play([python, program(framework)], 3000, reward="call")
    assert not completion.failure and completion.reward == 3
    assert world.trained(completion) == [f"{part}<|im_end|>" for part in (CALL, "It is 3", "Yes, I am")]
    assert completion.counts["agent/calls"] == 3 and completion.counts["agent/sequences"] == 1
    first, remaining_turns = world.text(completion).split(f"1+2{ASK}")
    assert '"add"' in first and ("Use the tool." in first) == (framework != "with_openai")
    tool_turns = f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>3</tool_response>{ASK}It is 3"
    assert remaining_turns == f"{tool_turns}<|im_end|>\n<|im_start|>user\nSure?{ASK}Yes, I am<|im_end|>"


def test_a_run_trains_on_tokens_that_the_server_sampled_for_agents(python: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", seed=3)
    chat_tokenizer().save_pretrained(model)
    rows = [{"prompt": f"{n}+{n}", "label": str(2 * n), "program": program(FRAMEWORKS[n % 3])} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # A row names its agent: each of the frameworks plays.
    choose = "import json, runpy, sys, io; t = sys.stdin.read(); sys.stdin = io.StringIO(t); "
    choose += "runpy.run_path(json.loads(t)['metadata']['program'], run_name='__main__')"
    more = dict(
        run__num_steps=2,
        model__path=model,
        data__train=tmp_path / "rows.jsonl",
        data__eval="null",
        agent__command=json.dumps([python, "-c", choose]),
        agent__reward="call",
        rollout__prompts_per_step=2,
        rollout__samples_per_prompt=2,
        rollout__max_new_tokens=1500,
        train__mini_batches=1,
        parallel__expert_model_parallel_size=1,
    )
    with SharedEngine(lambda: start_sglang(model, tmp_path / "log", "--enable-return-routed-experts")) as shared:
        result = train(arguments([shared.engine()], tmp_path / "run", **more))
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/reward_failed_fraction"] == 0 and step["rollout/agent/sequences"] < 1.5
        assert 2 <= step["rollout/agent/calls"] < 4 and step["rollout/agent/ignored_settings"] == 0
        assert 0.5 < step["rollout/given_token_fraction"] < 0.95
        assert step["train/abs_prob_diff"] < 1e-5 and abs(step["train/ratio"] - 1) < 1e-4
        assert step["train/router_missing"] == 0 and step["train/router_disagreement"] == 0
        assert step["rollout/policy_age"] == 0 and step["rollout/reward"] >= 1


# The run above has an honest server, too.
@pytest.mark.parametrize("top_p", [pytest.param(None, marks=pytest.mark.long), 0.7], ids=["honest", "filter"])
def test_agents_train_on_an_honest_server_and_a_filter_in_between_is_named(
    top_p: float | None, confident: tuple[Path, SharedEngine], tmp_path: Path
) -> None:
    """The sampling test reads the tokens of agents, too. More episodes than threads of a pool, each with two calls."""
    model, shared = confident
    rows = [{"prompt": f"{n}+{n}", "label": str(2 * n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = dict(
        run__num_steps=3,
        data__train=tmp_path / "rows.jsonl",
        data__eval="null",
        agent__function=f"{Path(__file__).parent}/agent_of_two_calls.py:run",
        agent__reward="exit",
        rollout__max_new_tokens=64,
    )
    filters = None if top_p is None else Sampling(top_p=top_p)
    with Proxy(shared.engine().url, before=filters) as proxy:
        result = train(from_model([proxy], model, tmp_path / "run", "fp32", **more))
    text = result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    if top_p is None:
        assert result.returncode == 0 and len(steps) == 3, text
        assert all(step["train/abs_prob_diff_first"] < 1e-5 for step in steps)
        assert all(step["rollout/agent/calls"] == 2 and step["rollout/agent/rejected_calls"] == 0 for step in steps)
        assert all(step["rollout/reward_failed_fraction"] == 0 for step in steps)
    else:
        assert result.returncode == 3 and len(steps) <= 1 and "filter" in text and proxy.url in text, text


@pytest.fixture(scope="module")
def confident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SharedEngine]]:
    """A model whose sampled tokens have a probability of .1 to .6 in the median, and its server."""
    folder = tmp_path_factory.mktemp("confident")
    model = make_model(folder / "model", seed=0, sharpness=5.0)
    with SharedEngine(lambda: start_sglang(model, folder / "log", "--enable-return-routed-experts")) as shared:
        yield model, shared
