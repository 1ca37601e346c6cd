"""Worked examples of the losses: a few tokens by their probabilities."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.objective import policy_loss
from megatron_dppo.losses.statistics import batch_statistics
from megatron_dppo.types import LossInputs

_TOPK = 2
_OTHER_SHARES = ((0.75, 0.25), (0.25, 0.75))


def show(
    config: LossConfig,
    *,
    pi: Sequence[float],
    mu: Sequence[float],
    advantages: Sequence[float],
    recomputed: Sequence[float] | None = None,
) -> None:
    """Print which tokens a loss keeps, and its gradient by log pi of each: ``-A w`` or 0.

    Example:
        >>> show(LossConfig(), pi=[0.5, 0.9], mu=[0.4, 0.5], advantages=[1.0, 1.0])
        kept      True  False
        gradient -1.25   0.00

    Args:
        config: The loss; where it has a Top-K, ``topk`` must be 2.
        pi: Probability of each sampled token now.
        mu: Probability in the rollout. Two more tokens share the rest of both, by 3 : 1 in mu and by 1 : 3 in pi.
        advantages: Advantage of each token. All tokens are one sequence.
        recomputed: Pi', probabilities that the trainer recomputed; None = ``mu``.
    """
    p, m = torch.tensor(pi, dtype=torch.float64), torch.tensor(mu, dtype=torch.float64)
    logprobs = p.log().requires_grad_()
    mu_rest, pi_rest = ((1 - x)[:, None] * torch.tensor(part) for x, part in zip((m, p), _OTHER_SHARES, strict=True))
    topk_logprobs = torch.cat([pi_rest, p[:, None]], 1).log().requires_grad_()
    signs = torch.tensor(advantages, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=logprobs,
        rollout_logprobs=m.log(),
        advantages=signs,
        loss_mask=torch.ones(len(pi), dtype=torch.bool),
        recomputed_logprobs=torch.tensor(mu if recomputed is None else recomputed, dtype=torch.float64).log(),
        sequence_ids=torch.zeros(len(pi), dtype=torch.int64),
        topk_logprobs=topk_logprobs,
        rollout_topk_logprobs=torch.cat([mu_rest, m[:, None]], 1).log(),
        topk_valid=torch.ones(len(pi), _TOPK + 1, dtype=torch.bool),
        topk_other_logprob=torch.full_like(p, -torch.inf),
        topk_other_square=torch.zeros_like(p),
        vocab_size=_TOPK + 1,
        token_weights=torch.ones(len(pi)),
    )
    inputs = replace(inputs, statistics=batch_statistics(inputs, config))
    output = policy_loss(inputs, config)
    output.loss_sum.backward()
    assert logprobs.grad is not None
    print("kept    ", " ".join(f"{keep!s:>5}" for keep in output.keep_mask.tolist()))
    print("gradient", " ".join(f"{x + 0.0:5.2f}" for x in logprobs.grad.tolist()))
