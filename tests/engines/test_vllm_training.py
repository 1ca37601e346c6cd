"""A whole training run against a real vLLM server."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import step_records, train
from tests.engines.runs import arguments
from tests.engines.servers import Engine
from tests.engines.tiny import Reference


def test_vllm_and_trainer_agree_on_every_token(vllm: Engine, old_model: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = {
        "rollout__engine": "vllm",
        "model__path": old_model.folder,
        "train__router_replay": "off",
        "rollout__temperature": 0.7,
        "train__mini_batches": 1,
        "run__num_steps": 3,
        "rollout__prompts_per_step": 4,
        "rollout__samples_per_prompt": 4,
    }
    result = train(arguments([vllm], folder, **more), processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(folder)
    assert len(steps) == 3
    assert all(step["train/abs_prob_diff"] < 1e-5 for step in steps)
