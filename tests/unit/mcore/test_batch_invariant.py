"""Settings that ``rollout.batch_invariant`` goes with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_dppo.config.schema import Config
from megatron_dppo.run.guard import FirstUpdateGuard

BASE: dict[str, dict[str, Any]] = {
    "run": {"output_dir": "x", "num_steps": 1},
    "model": {"path": "x", "dtype": "fp32"},
    "data": {"train": "x"},
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 8,
        "dtype": "fp32",
        "batch_invariant": True,
    },
    "optimizer": {"lr": 1e-3},
}


def configured(section: str, **changes: Any) -> Config:
    return Config.model_validate(BASE | {section: BASE.get(section, {}) | changes})


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("rollout", {"engine": "sglang"}, "rollout.engine = 'sglang' (expected 'local')"),
        ("rollout", {"dtype": "bf16"}, "rollout.dtype = 'bf16' (expected model.dtype = 'fp32'"),
        ("rollout", {"generate": "a.py:b"}, "rollout.generate"),
        ("rollout", {"oversample": 2.0, "abort_slowest": True}, "rollout.abort_slowest"),
        ("rollout", {"perturbation": {"router_noise": 0.1}}, "[rollout.perturbation]"),
        ("model", {"fused_head": False}, "model.fused_head"),
        ("train", {"router_replay": "rollout"}, "train.router_replay = 'rollout' (expected 'off'"),
        ("eval", {"overlap_training": True}, "eval.overlap_training"),
        ("train", {"layer_noise": {"std": 1e-6}}, "train.layer_noise.std = 1e-06 (expected 0, or set train.max_first"),
        ("parallel", {"tensor_model_parallel_size": 4}, "parallel.tensor_model_parallel_size = 4 (expected at most 2)"),
        ("parallel", {"pipeline_model_parallel_size": 2}, "parallel.pipeline_model_parallel_size = 2"),
        ("parallel", {"context_parallel_size": 2}, "parallel.context_parallel_size = 2"),
    ],
)
def test_incompatible_settings_are_named(section: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        configured(section, **changes)
    assert "rollout.batch_invariant = true is incompatible with" in str(caught.value) and words in str(caught.value)


def test_all_incompatible_settings_are_reported_at_once() -> None:
    with pytest.raises(ValidationError, match=r"fused_head.*tensor_model_parallel_size"):
        Config.model_validate(
            BASE | {"model": BASE["model"] | {"fused_head": False}, "parallel": {"tensor_model_parallel_size": 4}}
        )
    configured("parallel", tensor_model_parallel_size=2, expert_model_parallel_size=8)
    configured("train", router_replay="recorded", epochs=2)
    configured("rollout", top_p=0.9, dynamic_sampling=True, oversample=2.0)


def test_the_guard_allows_nothing_on_policy() -> None:
    made = configured("run")
    guard = FirstUpdateGuard.from_config(
        made.train, made.rollout, made.model, nonfinite_fraction=0.0, is_on_policy=True
    )
    assert guard.max_prob_diff == 0.0
    guard({"abs_prob_diff": 0.0})
    with pytest.raises(Exception, match="allows 0"):
        guard({"abs_prob_diff": 1e-12})
    stale = FirstUpdateGuard.from_config(
        made.train, made.rollout, made.model, nonfinite_fraction=0.0, is_on_policy=False
    )
    stale({"abs_prob_diff": 0.5})
