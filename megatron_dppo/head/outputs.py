"""The outputs of a loss on some rows at a time, put together."""

from __future__ import annotations

import torch

from megatron_dppo.head.row_plan import Rows
from megatron_dppo.types import LossOutput, Metric


def joined(outputs: list[LossOutput], rows: Rows) -> LossOutput:
    """The outputs of the chunks as that of all T rows."""
    first, *rest = outputs
    metrics = dict(first.metrics)
    for output in rest:
        metrics = {name: _add(metric, output.metrics[name]) for name, metric in metrics.items()}
    return LossOutput(
        loss_sum=torch.stack([output.loss_sum for output in outputs]).sum(),
        num_tokens=torch.stack([output.num_tokens for output in outputs]).sum(),
        keep_mask=rows.spread(torch.cat([output.keep_mask for output in outputs])),
        metrics=metrics,
        logprobs=_together([output.logprobs for output in outputs], rows),
    )


def _together(parts: list[torch.Tensor | None], rows: Rows) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return rows.spread(torch.cat(known)) if len(known) == len(parts) else None


def _add(a: Metric, b: Metric) -> Metric:
    if a.kind == "max":
        return Metric(torch.maximum(torch.as_tensor(a.numerator), torch.as_tensor(b.numerator)), kind="max")
    return Metric(a.numerator + b.numerator, a.denominator + b.denominator)
