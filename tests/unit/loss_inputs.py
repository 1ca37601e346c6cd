"""Small inputs for the tests of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.types import LossInputs, LossOutput

NAMES: tuple[str, ...] = loss_names()
TOPK = 2
"""K of the Top-K losses here."""


def loss_config(name: str, **keys: Any) -> LossConfig:
    """The loss with its defaults, and with the K of ``make_inputs``."""
    has_topk = "topk" in name or name == "score_centering" or keys.get("centering", False)
    return LossConfig(name=name, **{**({"topk": TOPK} if has_topk else {}), **keys})


def topk_fields(pi: Tensor, mu: Tensor, sampled: Tensor, k: int) -> dict[str, Tensor]:
    """The Top-K fields of LossInputs from whole distributions ``[T, V]``, with the pi of ``other`` summed, not
    subtracted."""
    ids = torch.sort(mu, dim=-1, descending=True, stable=True).indices[:, :k]
    inside = (ids == sampled[:, None]).any(-1)
    ids = torch.cat([ids, sampled[:, None]], -1)
    valid = torch.cat([torch.ones(len(pi), k, dtype=torch.bool), ~inside[:, None]], -1)
    in_set = torch.zeros_like(pi).scatter(-1, ids, 1.0).bool()
    return {
        "topk_logprobs": pi.gather(-1, ids).log(),
        "rollout_topk_logprobs": mu.gather(-1, ids).log(),
        "topk_valid": valid,
        "topk_other_logprob": torch.where(in_set, 0.0, pi).sum(-1).log(),
        "topk_other_square": torch.where(in_set, 0.0, pi).square().sum(-1),
    }


def make_inputs(
    pi: list[float], mu: list[float], advantages: list[float], mask: list[bool] | None = None, **more: Any
) -> tuple[LossInputs, Tensor]:
    """Inputs from probabilities, and their leaf ``logprobs``; every field of every loss is there.

    The Top-K fields are those of a vocabulary of the sampled token, one that is never sampled, and a third. The
    The recomputed policy is mu. All tokens are one sequence with weight 1.
    """
    logprobs = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()

    def whole(p: list[float]) -> Tensor:
        first = torch.tensor(p, dtype=torch.float64)
        return torch.stack([first, 0.75 * (1 - first), 0.25 * (1 - first)], -1)

    sampled = torch.zeros(len(pi), dtype=torch.int64)
    fields: dict[str, Any] = {
        **topk_fields(whole(pi), whole(mu).nan_to_num(0.5), sampled, TOPK),
        "recomputed_logprobs": torch.tensor(mu, dtype=torch.float64).log(),
        "sequence_ids": torch.zeros(len(pi), dtype=torch.int64),
        "token_weights": torch.ones(len(pi)),
        "vocab_size": 3,
        "statistics": {"largest_square": 0.1},
    }
    fields["topk_logprobs"].requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor([True] * len(pi) if mask is None else mask),
        rollout_logprobs=torch.tensor(mu, dtype=torch.float64).log(),
        **{**fields, **more},
    )
    return inputs, logprobs


def value(output: LossOutput, name: str) -> float:
    """A metric of a single micro-batch."""
    metric = output.metrics[name]
    return float(metric.numerator) / float(metric.denominator)
