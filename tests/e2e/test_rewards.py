"""Several rewards, one of them behind a server, with a KL penalty in the reward: a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from http_stub import Call, running
from tests.e2e.runs import flags, records, step_records, train

pytestmark = pytest.mark.e2e


async def classify(call: Call) -> Any:
    """Two classes; the second is a fiftieth of the text's length, and one text in about three has no number."""
    texts = call.body["text"]
    return [{"embedding": [0.0, float("nan") if sum(map(ord, t)) % 3 == 0 else len(t) / 50]} for t in texts]


def test_a_run_with_a_reward_model_beside_the_right_answer_and_a_kl_penalty(
    short_run: list[str], tmp_path: Path
) -> None:
    with running({"/classify": classify}) as stub:
        functions = {
            "correct": {"function": "math", "eval": True},
            "model": {
                "function": "reward_model",
                "weight": -0.5,
                "options": {"url": stub.url, "endpoint": "sglang_classify", "index": 1},
            },
        }
        table = ", ".join(f"{name} = {{{_inline(value)}}}" for name, value in functions.items())
        options = flags(
            reward__function="null",
            reward__functions=f"{{{table}}}",
            reward__kl_coef=0.05,
            reward__max_failed_fraction=1,
        )
        result = train([*short_run, *options])
    assert result.returncode == 0, result.stderr[-3000:]
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2 and len(stub.calls) >= 2
    for step in steps:
        assert step["rollout/reward"] == pytest.approx(
            step["rollout/reward/correct"] - 0.5 * step["rollout/reward/model"], abs=1e-5
        )
        assert step["rollout/reward/score"] == pytest.approx(step["rollout/reward"])
        assert 0 < step["rollout/reward/model"] < 5 and 0 <= step["rollout/reward_failed_fraction"] < 1
        assert "train/kl_in_reward" in step
    assert any(step["rollout/reward_failed_fraction"] > 0 for step in steps), "no answer of the server was bad"
    accuracies = [record["eval/accuracy"] for record in records(tmp_path / "run") if "eval/accuracy" in record]
    assert accuracies and all(8 * each == round(8 * each) for each in accuracies), "eighths: of right answers alone"


def _inline(table: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} = {{{_inline(value)}}}" if isinstance(value, dict) else f"{key} = {json.dumps(value)}"
        for key, value in table.items()
    )
