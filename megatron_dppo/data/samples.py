"""Token sequences to training samples: the one place of the shift by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import KeptSets, TrainingSample
from megatron_dppo.types.columns import TokenRows
from megatron_dppo.types.token_columns import TOKEN_COLUMNS


def to_training_sample(
    prompt_ids: Sequence[int] | Tensor,
    response_ids: Sequence[int] | Tensor,
    rollout_logprobs: Sequence[float] | Tensor | None,
    advantage: float,
    topk: tuple[Tensor, Tensor] | None = None,
    routed_experts: Tensor | None = None,
    sampled: Sequence[bool] | Tensor | None = None,
    kept: KeptSets | None = None,
    columns: Mapping[str, TokenRows] | None = None,
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
        columns: columns that a sample takes as they are (``TokenColumn.is_carried``), by name; the ones above may be
            given here too.

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
    carried: dict[str, Any] = dict(columns or {})
    if topk is not None:
        carried["rollout_topk_ids"], carried["rollout_topk_logprobs"] = topk
    carried |= {name: rows for name, rows in (("kept", kept), ("routed_experts", routed_experts)) if rows is not None}
    _check_columns(carried, len(prompt_ids), len(response_ids))
    return TrainingSample(
        tokens=sequence[:-1],
        labels=sequence[1:],
        loss_mask=loss_mask,
        advantages=torch.where(loss_mask, advantage, 0.0),
        rollout_logprobs=aligned,
        **carried,
    )


def _check_columns(columns: Mapping[str, TokenRows], prompt_tokens: int, response_tokens: int) -> None:
    for column in TOKEN_COLUMNS:
        rows = columns.get(column.name) if column.is_carried and column.name is not None else None
        if rows is not None:
            column.check(rows, prompt_tokens, response_tokens)
    ids, logprobs = columns.get("rollout_topk_ids"), columns.get("rollout_topk_logprobs")
    if isinstance(ids, Tensor) and isinstance(logprobs, Tensor) and ids.shape != logprobs.shape:
        raise ValueError(
            f"Top-K ids {tuple(ids.shape)} and log-probabilities {tuple(logprobs.shape)}, expected two of one shape "
            f"[{response_tokens}, K+1], one row for each response token"
        )
