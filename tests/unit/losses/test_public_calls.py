"""Wrong calls of the loss from another trainer are refused in words; fair ones are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

import megatron_dppo as md
from megatron_dppo import public

GRPO = md.LossConfig(name="grpo")
DPPO = md.LossConfig(name="dppo_binary_tv")
PROBABILITIES = torch.tensor([0.5, 0.9, 0.2])


def inputs(**changed: Any) -> md.LossInputs:
    """Three tokens, the last outside the loss mask."""
    columns: dict[str, Any] = {
        "logprobs": PROBABILITIES.log().requires_grad_(),
        "rollout_logprobs": torch.tensor([0.4, 0.5, 0.1]).log(),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
        "loss_mask": torch.tensor([True, True, False]),
    }
    return md.LossInputs(**columns | changed)


def outside(column: torch.Tensor, value: float) -> torch.Tensor:
    """Put a value where the loss mask is False."""
    return torch.cat([column.detach()[:2], torch.tensor([value])])


WRONG = {
    "probabilities": (
        {"logprobs": PROBABILITIES.clone().requires_grad_()},
        "as logprobs, .* got 0.9",
    ),
    "negative log-likelihoods": ({"logprobs": (-PROBABILITIES.log()).requires_grad_()}, "at most 0, got 0.6931"),
    "rollout probabilities": ({"rollout_logprobs": PROBABILITIES}, "as rollout_logprobs, .* got 0.9"),
    "integers": ({"logprobs": torch.tensor([-1, -2, -3])}, r"as logprobs, got torch\.int64"),
    "integer anchor": ({"rollout_logprobs": torch.tensor([-1, -2, -3])}, r"as rollout_logprobs, got torch\.int64"),
    "detached": ({"logprobs": PROBABILITIES.log()}, "got a detached tensor, which trains nothing"),
    "mask of floats": (
        {"loss_mask": torch.ones(PROBABILITIES.shape)},
        r"got torch\.float32\. Fix: loss_mask\.bool",
    ),
    "NaN": ({"logprobs": torch.tensor([-1.0, torch.nan, -1.0]).requires_grad_()}, "as logprobs, got NaN"),
    "NaN advantage": ({"advantages": torch.tensor([1.0, torch.nan, 0.0])}, "Expected finite advantages"),
    "infinite advantage": ({"advantages": torch.tensor([1.0, torch.inf, 0.0])}, "Expected finite advantages"),
    "list": ({"advantages": [1.0, 2.0, 3.0]}, "as advantages, got a list"),
    "float": ({"rollout_logprobs": 0.5}, "as rollout_logprobs, got a float"),
    "another shape": ({"advantages": torch.ones(2)}, r"advantages has shape \(2,\), expected that of logprobs"),
}
FAIR = {
    "as it is": {},
    "integer advantages": {"advantages": torch.tensor([1, -1, 0])},
    "an anchor with a gradient": {"rollout_logprobs": PROBABILITIES.log().requires_grad_()},
    "an anchor that is not finite": {"rollout_logprobs": torch.tensor([torch.nan, -torch.inf, -1.0])},
    "an empty mask": {"loss_mask": torch.zeros(3, dtype=torch.bool)},
    "no tokens": {
        "logprobs": torch.zeros(0, requires_grad=True),
        "rollout_logprobs": torch.zeros(0),
        "advantages": torch.zeros(0),
        "loss_mask": torch.zeros(0, dtype=torch.bool),
    },
    "NaN outside the mask": {"logprobs": outside(PROBABILITIES.log(), torch.nan).requires_grad_()},
    "above 0 outside the mask": {"logprobs": outside(PROBABILITIES.log(), 7.0).requires_grad_()},
    "NaN advantage outside the mask": {"advantages": torch.tensor([1.0, -1.0, torch.nan])},
    "a probability of 0": {"logprobs": torch.tensor([-torch.inf, -1.0, -1.0]).requires_grad_()},
    "rounding": {"logprobs": torch.tensor([1e-6, -1.0, -1.0]).requires_grad_()},
    "rounding of bf16": {"logprobs": torch.tensor([0.125, -1.0, -1.0], dtype=torch.bfloat16).requires_grad_()},
}


@pytest.mark.parametrize(("call", "config"), [(md.policy_loss, GRPO), (md.dppo_loss, DPPO)])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name: str, call: Any, config: md.LossConfig) -> None:
    changed, text = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call(inputs(**changed), config)


@pytest.mark.parametrize("name", FAIR)
def test_a_fair_call_is_not(name: str) -> None:
    output = md.dppo_loss(inputs(**FAIR[name]), DPPO)
    output.loss_sum.backward()
    assert torch.isfinite(output.loss_sum)


def test_the_value_alone_needs_no_gradient() -> None:
    with torch.no_grad():
        assert torch.isfinite(md.policy_loss(inputs(logprobs=PROBABILITIES.log()), DPPO).loss_sum)


def test_a_name_in_place_of_the_configuration() -> None:
    wrong: Any = "dppo_binary_tv"
    for call in (md.policy_loss, md.dppo_loss):
        with pytest.raises(TypeError, match=r"Fix: pass LossConfig\(name='dppo_binary_tv'\)"):
            call(inputs(), wrong)
    swapped: Any = DPPO, inputs()
    with pytest.raises(TypeError, match=r"Expected \(LossInputs, LossConfig\), got \(BinaryDPPO, LossInputs\)"):
        md.policy_loss(*swapped)


@pytest.mark.parametrize(
    ("key", "near"), [("threshold", "divergence_threshold_low"), ("topk_", "topk"), ("ratio_capp", "ratio_cap")]
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{key!r} = 3; did you mean .*{near!r}"):
        md.LossConfig(**{key: 3})
    with pytest.raises(ValidationError, match="divergence_threshold_low"):  # A key of another loss.
        md.LossConfig(name="grpo", divergence_threshold_low=0.2)


def test_a_device_with_a_queue_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a value waits for a GPU, so later calls queue work alone."""
    calls: list[md.LossInputs] = []
    monkeypatch.setattr(public, "check_values", calls.append)
    monkeypatch.setattr(public, "checked_on_device", set())
    columns = {name: value.to("meta") for name, value in vars(inputs()).items() if isinstance(value, torch.Tensor)}
    columns["logprobs"].requires_grad_()
    for _ in range(3):
        public.check_call(md.LossInputs(**columns), DPPO)
    public.check_call(md.LossInputs(**columns), GRPO)
    assert len(calls) == 2
    for _ in range(2):
        public.check_call(inputs(), DPPO)
    assert len(calls) == 4


def test_only_public_names_are_listed() -> None:
    assert dir(md) == sorted(md.__all__)
