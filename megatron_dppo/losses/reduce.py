"""Sums, maxima and aggregation weights over the loss mask, safe against anything that stands outside it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.config.loss import Aggregation


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of per-token statistics: float64 if any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``values [T]`` where ``mask [T]`` is True. A NaN outside the mask adds exactly 0."""
    return torch.where(mask, values, 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest of 0 and of ``values [T]`` where ``mask [T]`` is True, as a scalar."""
    if values.numel() == 0:
        return values.new_zeros(())
    return torch.where(mask, values, 0.0).clamp(min=0).amax()


def per_sequence(values: Tensor, mask: Tensor, sequence_ids: Tensor, kind: Literal["sum", "mean"]) -> Tensor:
    """Return the sum or the mean of each token's sequence over its tokens inside ``mask``; all ``[T]``.

    Every sequence must be here as a whole: a sequence that is split over context-parallel ranks or micro-batches gives
    a sum over the part only. A sequence without a token inside the mask gives 0.
    """
    # The number of sequences is a shape, so on CUDA this line waits for the device.
    sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    sums = values.new_zeros(sequences).index_add(0, sequence_ids, torch.where(mask, values, 0.0))
    if kind == "mean":
        sums = sums / values.new_zeros(sequences).index_add(0, sequence_ids, mask.to(values.dtype)).clamp(min=1)
    return sums[sequence_ids]


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Counts over all micro-batches of all data-parallel ranks of one optimizer update, known before it starts."""

    num_tokens: int
    """Tokens inside the loss mask, masked ones included."""
    num_sequences: int
    """Sequences with at least one token inside the loss mask."""


def sequence_weight(
    aggregation: Aggregation, tokens_in_sequence: int, totals: BatchTotals, horizon: int | None = None
) -> float:
    """Return the aggregation weight w of each token of one sequence.

    ``sum(w * loss) / totals.num_tokens`` is the aggregate. The caller always divides by one global token count; the
    weight turns that mean into another one, and depends on nothing but the sequence and the totals, so the result is
    the same for every packing and split.

    With N tokens and S sequences in total, L tokens in this sequence, horizon H, names of verl's ``agg_loss``:

    - ``token_mean``: 1.
    - ``token_sum``: N.
    - ``token_sum_norm``: N / H (``seq-mean-token-sum-norm`` of Stable-RL; Dr. GRPO, arXiv 2503.20783).
    - ``seq_mean_token_sum``: N / S.
    - ``seq_mean_token_mean``: N / (S L).
    - ``seq_mean_token_sum_norm``: N / (S H) (``seq-mean-token-sum-norm`` of verl).

    Args:
        aggregation: Name of the aggregation.
        tokens_in_sequence: L, tokens of this sequence inside the loss mask; 0 gives weight 0.
        totals: The global counts.
        horizon: H; required by the ``*_norm`` aggregations.

    Raises:
        ValueError: An unknown aggregation, or a ``*_norm`` aggregation without horizon.
    """
    if aggregation.endswith("_norm") and horizon is None:
        raise ValueError(f"aggregation {aggregation!r} divides by a fixed horizon, but horizon is None; set it")
    if tokens_in_sequence == 0:
        return 0.0
    tokens = totals.num_tokens
    sequences = totals.num_sequences
    norm = horizon or 1
    weights: dict[str, float] = {
        "token_mean": 1.0,
        "token_sum": tokens,
        "token_sum_norm": tokens / norm,
        "seq_mean_token_sum": tokens / sequences,
        "seq_mean_token_mean": tokens / (sequences * tokens_in_sequence),
        "seq_mean_token_sum_norm": tokens / (sequences * norm),
    }
    if aggregation not in weights:
        raise ValueError(f"aggregation {aggregation!r} is unknown; expected one of {sorted(weights)}")
    return weights[aggregation]


def token_weights(
    loss_mask: Tensor,
    sequence_ids: Tensor,
    aggregation: Aggregation,
    totals: BatchTotals,
    horizon: int | None = None,
) -> Tensor:
    """Return ``sequence_weight`` of every token of a packed row ``[T]``, float32, for ``LossInputs.token_weights``.

    Every sequence must be in the row as a whole (compute the weights before a context-parallel split).
    """
    # Few sequences have the same length: one weight is computed for each length. float32 counts exactly up to 2^24
    # tokens.
    count = per_sequence(loss_mask.to(torch.float32), loss_mask, sequence_ids, "sum").tolist()
    weights = {n: sequence_weight(aggregation, int(n), totals, horizon) for n in set(count)}
    return torch.tensor([weights[n] for n in count], dtype=torch.float32, device=loss_mask.device)
