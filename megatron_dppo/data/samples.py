"""Token sequences to training samples: the one place of the shift by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.types import KeptSets, TrainingSample, check_kept


def to_training_sample(
    prompt_ids: Sequence[int] | Tensor,
    response_ids: Sequence[int] | Tensor,
    rollout_logprobs: Sequence[float] | Tensor | None,
    advantage: float,
    topk: tuple[Tensor, Tensor] | None = None,
    routed_experts: Tensor | None = None,
    sampled: Sequence[bool] | Tensor | None = None,
    kept: KeptSets | None = None,
) -> TrainingSample:
    """Align a prompt and its response to the labels.

    Position ``t`` predicts ``labels[t] = sequence[t + 1]``, so the response's first token sits at ``len(prompt) - 1``.
    A response token that was not sampled, or whose log mu is not finite, is outside of loss mask and denominators.

    Args:
        prompt_ids: at least one token.
        response_ids: R tokens, the end-of-sequence token included.
        rollout_logprobs: R natural log-probabilities; None for supervised samples.
        advantage: one value for the whole response.
        topk: the rollout's Top-K ids and log-probabilities, ``[R, K+1]`` each (see ``Completion``).
        routed_experts: ``[P + R - 1, L, k]``, one row for each token of the sequence but the last.
        sampled: [R] False on tokens that were given to the policy, such as a tool's; None = it sampled all of them.
        kept: of R tokens, the ids that the rollout's filters left; None = no filter.

    Raises:
        ValueError: an empty prompt or response, or a column of another length.
    """
    if not len(prompt_ids) or not len(response_ids):
        raise ValueError(f"a sample needs tokens, got {len(prompt_ids)} prompt and {len(response_ids)} response tokens")
    for column, name in ((rollout_logprobs, "rollout log-probabilities"), (sampled, "entries of the loss mask")):
        if column is not None and len(column) != len(response_ids):
            raise ValueError(f"{len(column)} {name} for {len(response_ids)} response tokens")
    sequence = torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids in (prompt_ids, response_ids)])
    length, first = sequence.numel() - 1, len(prompt_ids) - 1
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[first:] = True if sampled is None else torch.as_tensor(sampled)
    aligned = None
    if rollout_logprobs is not None:
        own = torch.as_tensor(rollout_logprobs, dtype=torch.float32)
        loss_mask[first:] &= own.isfinite()
        aligned = torch.zeros(length, dtype=torch.float32)
        aligned[first:] = torch.where(loss_mask[first:], own, 0.0)
    _check_sets(topk, kept, len(response_ids))
    if routed_experts is not None and len(routed_experts) != length:
        raise ValueError(
            f"routed experts of {len(routed_experts)} tokens for a sequence of {len(prompt_ids)} prompt and "
            f"{len(response_ids)} response tokens; expected {length} rows, one for each token but the last"
        )
    return TrainingSample(
        tokens=sequence[:-1],
        labels=sequence[1:],
        loss_mask=loss_mask,
        advantages=torch.where(loss_mask, advantage, 0.0),
        rollout_logprobs=aligned,
        rollout_topk_ids=topk and topk[0],
        rollout_topk_logprobs=topk and topk[1],
        kept=kept,
        routed_experts=routed_experts,
    )


def _check_sets(topk: tuple[Tensor, Tensor] | None, kept: KeptSets | None, response_tokens: int) -> None:
    if kept is not None:
        check_kept(kept, response_tokens)
    if topk is None:
        return
    ids, logprobs = topk
    if ids.shape != logprobs.shape or ids.dim() != 2 or ids.shape[0] != response_tokens:
        raise ValueError(
            f"Top-K ids {tuple(ids.shape)} and log-probabilities {tuple(logprobs.shape)}, expected two of shape "
            f"[{response_tokens}, K+1], one row for each response token"
        )
