"""Losses of the Tinker API against plain loops in float64, and what a request must not ask for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_dppo.types import LossInputs
from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.losses import read_loss
from megatron_dppo_tinker.wire import Datum

VOCAB = 16


def inputs(seed: int, tokens: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """log pi with a gradient, log mu and factors of both signs, some 0; float64."""
    generator = torch.Generator().manual_seed(seed)
    mu = torch.empty(tokens, dtype=torch.float64).uniform_(-3, -0.01, generator=generator)
    shift = torch.empty(tokens, dtype=torch.float64).normal_(0, 0.5, generator=generator)
    pi = (mu + shift).clamp(max=-1e-3).requires_grad_()
    factor = torch.empty(tokens, dtype=torch.float64).normal_(generator=generator)
    return pi, mu, factor * (torch.rand(tokens, generator=generator) > 0.2)


def expected(name: str, pi: float, mu: float, factor: float, config: dict[str, float]) -> tuple[float, float]:
    """Value and derivative by log pi of one token."""
    ratio = math.exp(pi - mu)
    if name == "cross_entropy":
        return -factor * pi, -factor
    if name == "importance_sampling":
        return -factor * ratio, -factor * ratio
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "ppo":
        clipped = min(max(ratio, low), high)
        objective = min(factor * ratio, factor * clipped)
        return -objective, -factor * ratio if objective == factor * ratio else 0.0
    if name == "cispo":
        weight = min(max(ratio, low), high)
        return -factor * weight * pi, -factor * weight
    assert name == "dppo_binary_tv"
    limit = config["divergence_threshold_high" if factor > 0 else "divergence_threshold_low"]
    is_masked = factor * (pi - mu) > 0 and abs(math.exp(pi) - math.exp(mu)) > limit
    weight = 0.0 if is_masked else min(ratio, 5.0)
    return -factor * weight * pi, -factor * weight


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
        ("cispo", {}),
        ("cispo", {"clip_high_threshold": 3.0}),
        ("dppo_binary_tv", {"divergence_threshold_low": 0.05, "divergence_threshold_high": 0.1}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_plain_loops(name: str, config: dict[str, float], seed: int) -> None:
    pi, mu, factor = inputs(seed)
    loss = read_loss(name, config)
    values = LossInputs(
        logprobs=pi, rollout_logprobs=mu, advantages=factor, loss_mask=torch.ones(len(pi), dtype=torch.bool)
    )
    output = loss.objective.loss(values)
    output.loss_sum.backward()
    rows = [expected(name, *each, config) for each in zip(pi.tolist(), mu.tolist(), factor.tolist(), strict=True)]
    assert pi.grad is not None
    assert float(output.loss_sum) == pytest.approx(sum(value for value, _ in rows), rel=1e-12)
    torch.testing.assert_close(pi.grad, torch.tensor([slope for _, slope in rows], dtype=torch.float64))
    assert not loss.objective.skips_zero_advantage, "the client reads the log-probability of every position"


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("nonsense", {}, "unknown"),
        ("gspo", {}, "not served"),
        ("stable_reinforce", {}, "stability"),
        ("custom", {}, "forward_backward_custom"),
        ("os:system", {}, "unknown"),
        ("/tmp/evil.py:loss", {}, "unknown"),
        ("verl/dppo_kl", {}, "unknown"),
        ("dppo_binary_tv", {"mask": "/tmp/evil.py:mask"}, "cannot name a function"),
        ("dppo_binary_tv", {"mask_options": "x"}, "cannot name a function"),
        ("dppo_binary_tv", {"name": "pg_is", "divergence_threshold_low": 3.0}, "total variation"),
        ("dppo_binary_tv", {"divergence_threshold": 0.1}, "divergence_threshold"),
        ("dppo_topk_tv", {}, "rollout_topk"),
        ("dppo_binary_tv", {"kl_coef": 0.1}, "reference_logprobs"),
        ("dppo_binary_tv", {"entropy_coef": 0.1}, "entropy"),
        ("dppo_binary_tv", {"aggregation": "token_mean"}, "sums over tokens"),
        ("ppo", {"clip_ratio_low": 0.2}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_high_threshold"),
        ("ppo", {"clip_low_threshold": "x"}, "clip_low_threshold"),
        ("importance_sampling", {"x": 1.0}, "it has none"),
    ],
)
def test_what_is_not_served_is_refused_in_words(name: str, config: dict[str, float | str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_loss(name, config)


def datum(**changes: Tensor) -> Datum:
    """A datum of three tokens for ``ppo``."""
    values = {
        "target_tokens": torch.tensor([1, 2, 3]),
        "logprobs": torch.tensor([-1.0, -2.0, 0.0]),
        "advantages": torch.tensor([0.0, 1.0, -1.0]),
    }
    tokens = changes.pop("tokens", torch.tensor([5, 1, 2]))
    return Datum(tokens, values | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": torch.tensor([5, 1, VOCAB])}, "model_input has ids outside 0"),
        ({"target_tokens": torch.tensor([1, -1, 3])}, "target_tokens has ids outside"),
        ({"target_tokens": torch.tensor([[1], [2], [3]])}, "value for each"),
        ({"logprobs": torch.tensor([-1.0, -2.0])}, "value for each"),
        ({"logprobs": torch.tensor([-1.0, torch.nan, 0.0])}, "not finite"),
        ({"advantages": torch.tensor([0.0, torch.inf, 0.0])}, "not finite"),
        ({"logprobs": torch.tensor([-1.0, -2.0, 3.0])}, "has 3: expected log-probabilities"),
        ({"logprobs": torch.tensor([1, -2, -3])}, "has 1: expected log-probabilities"),
        ({"logprobs": torch.tensor([-1.0, -2.0, 1e-3])}, "at most 0"),
        ({"mask": torch.ones(3)}, "expected exactly"),
        ({"tokens": torch.zeros(9, dtype=torch.int64)}, "one value"),
    ],
)
def test_a_datum_that_does_not_fit_is_refused(changes: dict[str, Tensor], words: str) -> None:
    loss = read_loss("ppo", {})
    assert loss.sample(datum(), VOCAB, 8).labels.tolist() == [1, 2, 3]
    with pytest.raises(RequestError, match=words):
        loss.sample(datum(**changes), VOCAB, 8)


def test_a_datum_beyond_the_context_is_refused() -> None:
    with pytest.raises(RequestError, match="3 tokens, expected 1 to 2"):
        read_loss("ppo", {}).sample(datum(), VOCAB, 2)
