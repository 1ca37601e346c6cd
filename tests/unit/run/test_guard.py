"""The guard of the first update: what it lets pass, what it stops, and that nothing was changed by then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError, TrainingStopped
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.run.guard import FirstUpdateGuard, count_nonfinite_tokens
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup
from tests.unit.columns import ids, logs, mask
from tests.unit.configs import config


def guard(dropped: float = 0.0, *, on_policy: bool = True, **sections: dict[str, Any]) -> FirstUpdateGuard:
    made = config(**sections)
    return FirstUpdateGuard.from_config(
        made.train, made.rollout, made.model, nonfinite_fraction=dropped, is_on_policy=on_policy
    )


FP32 = {"model": {"dtype": "fp32"}, "rollout": {"dtype": "fp32"}}


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        (FP32, 1e-3),
        ({"model": {"dtype": "fp32"}}, 0.06),
        ({"rollout": {"dtype": "fp32"}}, 0.06),
        (FP32 | {"train": {"max_first_prob_diff": 0.2}}, 0.2),
    ],
)
def test_the_limit_follows_the_coarser_dtype_or_the_configuration(sections: dict[str, Any], limit: float) -> None:
    guard(**sections)({"abs_prob_diff": limit})
    for value in (limit * 1.01, math.nan, math.inf):
        with pytest.raises(TrainingStopped, match=r"nothing was learned") as caught:
            guard(**sections)({"abs_prob_diff": value})
        assert f"allows {limit:g}" in str(caught.value) and "another position" in str(caught.value)
        assert caught.value.exit_code == 3


def test_the_message_mentions_layer_noise_only_if_it_is_on() -> None:
    for std, told in ((0.25, True), (0.0, False)):
        with pytest.raises(TrainingStopped) as caught:
            guard(train={"layer_noise": {"std": std}})({"abs_prob_diff": 0.5})
        assert ("train.layer_noise.std = 0.25" in str(caught.value)) == told


def test_tokens_of_older_weights_have_no_limit_and_off_disables_the_guard() -> None:
    guard(on_policy=False)({"abs_prob_diff": 0.9})
    guard(train={"max_first_prob_diff": "off"})({"abs_prob_diff": math.nan})
    guard(1.0, train={"max_nonfinite_fraction": "off"})({"abs_prob_diff": 0.0})


@pytest.mark.parametrize("on_policy", [True, False])
def test_dropped_tokens_stop_the_run_even_without_another_limit(on_policy: bool) -> None:
    guard(0.01, on_policy=on_policy)({"abs_prob_diff": 0.0})
    with pytest.raises(TrainingStopped, match=r"100\.00% of the sampled tokens .*max_nonfinite_fraction = 0\.01"):
        guard(1.0, on_policy=on_policy)({"abs_prob_diff": 0.0})
    with pytest.raises(TrainingStopped, match=r"0\.20% of the sampled"):
        guard(0.002, train={"max_nonfinite_fraction": 0.001})({"abs_prob_diff": 0.0})


def test_both_problems_are_reported_at_once() -> None:
    with pytest.raises(TrainingStopped, match=r"(?s)50\.00% of the sampled.*by 0\.5 on average"):
        guard(0.5)({"abs_prob_diff": 0.5})


@pytest.mark.parametrize(
    "train", [{"max_first_prob_diff": "none"}, {"max_first_prob_diff": 0.0}, {"max_nonfinite_fraction": 1.0}]
)
def test_other_values_of_the_keys_are_rejected(train: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_"):
        guard(train=train)


class Recorder:
    """A trainer that only counts."""

    routing_shape = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def accumulate(
        self, batches: Sequence[Any], objective: Any, teacher_targets: Sequence[Any], seen: Any
    ) -> dict[str, float]:
        self.calls.append("accumulate")
        return {"abs_prob_diff": 0.25 * len(self.calls)}

    def apply(self, metrics: Mapping[str, float]) -> str:
        self.calls.append("apply")
        return "applied"


class Planned(Updater):
    def _pack(self, samples: list[Any]) -> Any:
        return samples, samples

    def _add_token_weights(self, packed: Any) -> Any:
        return packed


def updates(check: Any) -> tuple[Recorder, Any]:
    recorder, train = Recorder(), TrainConfig(mini_batches=2, epochs=2)
    updater = Planned(cast(Any, recorder), train, config().loss)
    return recorder, updater.run(cast(Any, [1, 2, 3, 4]), 0, Clock(), check)


def test_only_the_first_update_is_checked_before_it_is_applied() -> None:
    seen: list[Mapping[str, float]] = []
    recorder, results = updates(seen.append)
    assert list(results) == ["applied"] * 4
    assert seen == [{"abs_prob_diff": 0.25}]

    def refuse(metrics: Mapping[str, float]) -> None:
        raise TrainingStopped("no")

    recorder, results = updates(refuse)
    with pytest.raises(TrainingStopped):
        list(results)
    assert recorder.calls == ["accumulate"]


def test_dropped_tokens_are_sampled_tokens_without_a_finite_logprob() -> None:
    prompt = Prompt(prompt_id="p", text="p", token_ids=(1,), label="")

    def group(logprobs: tuple[float, ...], sampled: tuple[bool, ...] | None = None) -> RolloutGroup:
        completion = Completion(
            token_ids=ids([1] * len(logprobs)),
            logprobs=logs(logprobs),
            finish_reason="length",
            policy_version=0,
            text="",
            loss_mask=None if sampled is None else mask(sampled),
        )
        return RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=0.0),))

    groups = [
        group((-1.0, math.nan, -math.inf, math.inf)),
        group((-1.0, math.nan, -1.0), (True, False, True)),
    ]
    assert tuple(count_nonfinite_tokens(groups)) == (3, 6, "mean")
