"""Reported figures of other losses against those losses themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss, with_cosines
from megatron_dppo.types import LossInputs
from tests.unit.loss_inputs import topk_fields, value

TOKENS, VOCABULARY, TOPK = 300, 16, 4
ALWAYS = {"dppo_binary_tv", "dppo_binary_kl", "drpo", "ipo", "grpo", "cispo", "pg_is"}


def make(seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mu = (2 * normal(TOKENS, VOCABULARY)).softmax(-1)
    pi = (mu.log() + normal(TOKENS, VOCABULARY)).softmax(-1)
    sampled = torch.multinomial(mu, 1, generator=generator)[:, 0]
    rows = torch.arange(TOKENS)
    fields = topk_fields(pi, mu, sampled, TOPK)
    return LossInputs(
        logprobs=pi[rows, sampled].log(),
        rollout_logprobs=mu[rows, sampled].log(),
        advantages=normal(TOKENS) * (torch.rand(TOKENS, generator=generator) < 0.9),
        loss_mask=torch.rand(TOKENS, generator=generator) < 0.8,
        token_weights=torch.rand(TOKENS, generator=generator),
        recomputed_logprobs=mu[rows, sampled].log() + 0.1,
        sequence_ids=rows // 30,
        **fields | {"topk_logprobs": fields["topk_logprobs"].requires_grad_()},
    )


def gradient(inputs: LossInputs, config: LossConfig) -> Tensor:
    leaf = inputs.logprobs.detach().requires_grad_()
    policy_loss(dataclasses.replace(inputs, logprobs=leaf), config).loss_sum.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(name="dppo_binary_tv", divergence_threshold_high=0.05, ratio_cap=1.5),
        LossConfig(name="dppo_topk_kl", topk=TOPK, topk_eviction=True),
        LossConfig(name="grpo"),
        LossConfig(name="minirl", mismatch="mask_token"),
        LossConfig(form="ratio", ratio_cap=1.2),
        LossConfig(name="cispo", form="ratio", ratio_cap=1.5, ratio_floor=0.7),
        LossConfig(name="gspo"),
    ],
    ids=lambda c: f"{c.name} {c.form}",
)
def test_shares_and_cosines_are_those_of_the_other_losses_over_all_micro_batches(config: LossConfig) -> None:
    """Two micro-batches: the sums are added up before anything is divided."""
    batches = [make(0), make(1)]
    outputs = [policy_loss(batch, config, counterfactuals=True) for batch in batches]
    names = {name.split("/")[1] for name in outputs[0].metrics if name.startswith("counterfactual/")}
    assert names == ALWAYS | ({"dppo_topk_tv", "dppo_topk_kl"} if config.is_topk else set())
    reduced = {
        name: sum(float(o.metrics[name].numerator) for o in outputs)
        / sum(float(o.metrics[name].denominator) for o in outputs)
        for name in outputs[0].metrics
        if name.startswith("counterfactual/")
    }
    result = with_cosines(reduced | {"loss": 1.0})
    assert result["loss"] == 1.0 and len(result) == 2 * len(names) + 1
    own = torch.cat([gradient(batch, config) for batch in batches])
    for name in names:
        keys = {"topk": TOPK, "topk_eviction": config.topk_eviction} if "topk" in name else {}
        other = LossConfig(name=name, **keys)
        theirs = torch.cat([gradient(batch, other) for batch in batches])
        cosine = float(torch.nn.functional.cosine_similarity(own, theirs, dim=0))
        assert result[f"counterfactual/{name}/cosine"] == pytest.approx(cosine, rel=1e-9), name
        acting = [int((b.loss_mask & (b.advantages != 0)).sum()) for b in batches]
        shares = [value(policy_loss(b, other), "mask_fraction") for b in batches]
        dropped = sum(share * count for share, count in zip(shares, acting, strict=True))
        assert result[f"counterfactual/{name}/mask_fraction"] == pytest.approx(dropped / sum(acting), rel=1e-9), name
    assert "counterfactual/grpo/cosine" not in policy_loss(batches[0], config).metrics


def test_no_counterfactual_metrics_without_a_gradient() -> None:
    still = dataclasses.replace(make(2), advantages=torch.zeros(TOKENS))
    output = policy_loss(still, LossConfig(), counterfactuals=True)
    assert all(float(m.denominator) == 0 for n, m in output.metrics.items() if n.startswith("counterfactual/"))
    assert with_cosines({}) == {}
