"""The policy's own Top-k of a head: each shard's candidates, and the merge of all shards'."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.head.rows import RowTotals
from megatron_dppo.parallel.vocab_topk import shard_topk


def candidates(logits: Tensor, width: int, first: int) -> Tensor:
    """``[n, 2 width]``: the shard's largest logits and, as the bits of floats, their global ids."""
    values, places = shard_topk(logits, width, logits.dtype)
    # One collective for both, and exact for every vocabulary.
    ids = (places + first).to(torch.int64 if logits.dtype == torch.float64 else torch.int32)
    return torch.cat([values, ids.view(logits.dtype)], 1)


def merge_candidates(parts: Tensor, k: int, totals: RowTotals, temperature: float) -> tuple[Tensor, Tensor]:
    """``[ranks, n, 2 width]`` to the k largest: log-probabilities ``[n, k]`` and ids ``[n, k]`` int64."""
    shard_values, shard_ids = parts.transpose(0, 1).chunk(2, dim=2)
    values, ids = shard_values.flatten(1), shard_ids.flatten(1)
    # Equal values stand by rising id already, and what fills up a short shard stands after every entry.
    order = values.argsort(dim=1, descending=True, stable=True)[:, :k]
    integer = torch.int64 if ids.dtype == torch.float64 else torch.int32
    logprobs = (values.gather(1, order) - totals.maximum[:, None]) / temperature - totals.total.log()[:, None]
    return logprobs, ids.view(integer).long().gather(1, order)
