"""Token sequences to training samples: the one place of the shift by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_dppo.types import TrainingSample


def to_training_sample(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    rollout_logprobs: Sequence[float] | None,
    advantage: float,
) -> TrainingSample:
    """Align a prompt and its response to the labels.

    Position ``t`` predicts ``labels[t] = sequence[t + 1]``, so the response's first token sits at ``len(prompt) - 1``.
    A response token whose rollout log-probability is not finite leaves the loss mask (and so every denominator).

    Args:
        prompt_ids: at least one token.
        response_ids: R tokens, the end-of-sequence token included.
        rollout_logprobs: R natural log-probabilities; None for supervised samples.
        advantage: one value for the whole response.

    Raises:
        ValueError: an empty prompt or response, or log-probabilities of another length.
    """
    if not prompt_ids or not response_ids:
        raise ValueError(f"a sample needs tokens, got {len(prompt_ids)} prompt and {len(response_ids)} response tokens")
    if rollout_logprobs is not None and len(rollout_logprobs) != len(response_ids):
        raise ValueError(f"{len(rollout_logprobs)} rollout log-probabilities for {len(response_ids)} response tokens")
    sequence = torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64)
    length, first = sequence.numel() - 1, len(prompt_ids) - 1
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[first:] = True
    aligned = None
    if rollout_logprobs is not None:
        aligned = torch.zeros(length, dtype=torch.float32)
        finite = [math.isfinite(x) for x in rollout_logprobs]
        loss_mask[first:] = torch.tensor(finite)
        aligned[first:] = torch.tensor([x if ok else 0.0 for x, ok in zip(rollout_logprobs, finite, strict=True)])
    return TrainingSample(
        tokens=sequence[:-1],
        labels=sequence[1:],
        loss_mask=loss_mask,
        advantages=torch.where(loss_mask, advantage, 0.0),
        rollout_logprobs=aligned,
    )
