"""``eval.stop_at_accuracy``: which configurations have it, and which checkpoints are of a run that is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.setup import run_folder
from megatron_dppo.setup.run_folder import is_finished

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


def config(*overrides: str) -> Config:
    return load_config(EXAMPLE, list(overrides))


def test_stop_at_needs_an_evaluation_with_an_immediate_result() -> None:
    assert config().eval.stop_at_accuracy is None
    assert config("--eval.stop_at_accuracy", "0.9").eval.stop_at_accuracy == 0.9
    for overrides, text in (
        (["--eval.overlap_training", "true"], "Remove one of them"),
        (["--data.eval", "null"], "no data.eval: nothing is evaluated"),
        (["--eval.every", "0"], "eval.every = 0: nothing is evaluated"),
    ):
        with pytest.raises(ConfigError, match=text):
            config("--eval.stop_at_accuracy", "0.9", *overrides)
    server = ["--rollout.engine", "sglang", "--rollout.servers.urls", '["http://127.0.0.1:1"]']
    assert config(*server).evaluates_beside_training
    assert not config(*server, "--eval.stop_at_accuracy", "0.9").evaluates_beside_training


def test_every_0_never_evaluates_or_saves_early() -> None:
    due = [step for step in range(8) if config("--eval.every", "3").eval.is_due(step, 7)]
    assert due == [0, 3, 6, 7]
    assert not any(config("--eval.every", "0").eval.is_due(step, 7) for step in range(8))
    assert config("--checkpoint.save_every", "0").checkpoint.save_every == 0
    for overrides in (["--eval.every", "0"], ["--data.eval", "null"]):
        with pytest.raises(ConfigError, match=r"checkpoint.keep_best = true"):
            config("--checkpoint.keep_best", "true", *overrides)
    with pytest.raises(ConfigError, match=r"eval\.every"):
        config("--eval.every", "-1")


@pytest.mark.parametrize(
    ("step", "goal", "best", "over"),
    [
        (3, None, (0.9, 3), False),
        (3, 0.9, (0.9, 3), True),
        (3, 0.9, (0.89, 3), False),
        (3, 0.9, None, False),
        (9, 0.9, None, True),
    ],
)
def test_a_run_ends_when_it_is_solved_or_at_its_last_step(
    step: int, goal: float | None, best: Any, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {} if goal is None else {"stop_at_accuracy": goal}  # an older version did not have the key
    state = {"step": step, "best": best, "config": {"run": {"num_steps": 9}, "eval": evaluation}}
    monkeypatch.setattr(run_folder, "checkpoints", lambda _: [Path("step_000003")])
    monkeypatch.setattr(run_folder, "read_state", lambda _: state)
    assert is_finished(Path("run")) is over
