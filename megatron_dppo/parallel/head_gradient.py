"""The gradients of hidden states, weight and bias, added up over the chunks of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.parallel.head_rows import Head
from megatron_dppo.parallel.mixed_gemm import WeightGradient
from megatron_dppo.parallel.row_plan import Rows


class HeadGradient:
    """Takes the gradient of the logits chunk by chunk.

    Args:
        head: the layer.
        rows: the rows of the call.
        hidden: ``[T, H]``
        needed: whether hidden, weight and bias need a gradient.
        chunks: how many chunks with a gradient there will be.
        main_grad: add the weight's gradient to this fp32 tensor; None = keep it here.
    """

    def __init__(
        self,
        head: Head,
        rows: Rows,
        hidden: Tensor,
        needed: tuple[bool, bool, bool],
        chunks: int,
        main_grad: Tensor | None,
    ) -> None:
        self._head, self._rows = head, rows
        self._hidden = hidden.new_empty(rows.num_gradient, hidden.shape[1]) if needed[0] else None
        self._weight = WeightGradient(head.weight, chunks, main_grad) if needed[1] else None
        self._bias = head.weight.new_zeros(len(head.weight), dtype=head.dtype) if needed[2] else None

    def add(self, start: int, dlogits: Tensor, hidden: Tensor) -> None:
        """``dlogits [n, W]`` of the plan's rows from ``start`` on, and their ``hidden [n, H]``."""
        if self._hidden is not None:
            torch.mm(dlogits, self._head.weight, out=self._hidden[start : start + len(dlogits)])
        if self._weight is not None:
            self._weight.add(dlogits, hidden)
        if self._bias is not None:
            self._bias += dlogits.sum(0, dtype=self._bias.dtype)

    def hidden(self) -> Tensor | None:
        """``[n, H]`` of the rows with a gradient, this shard's part of it; None where it is not needed."""
        return self._hidden

    def weight(self) -> Tensor | None:
        """``[W, H]``; None where it is not needed, or went to ``main_grad``."""
        return None if self._weight is None else self._weight.result()

    def bias(self) -> Tensor | None:
        """``[W]``; None where it is not needed."""
        return None if self._bias is None else self._bias.to(self._head.weight.dtype)


def checked_main_grad(weight: Tensor, accumulate: bool) -> Tensor | None:
    """``weight.main_grad`` if the gradient is to be added there, else None.

    Raises:
        ValueError: there is none, or it is not float32 in the shape of the weight.
    """
    if not accumulate or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise ValueError("accumulate_main_grad needs weight.main_grad, which Megatron's gradient buffers set")
    if main_grad.dtype != torch.float32 or main_grad.shape != weight.shape or weight.dtype == torch.float64:
        raise ValueError(
            f"accumulate_main_grad needs a float32 weight.main_grad {tuple(weight.shape)} for a weight of at most "
            f"float32, got {main_grad.dtype} {tuple(main_grad.shape)} for {weight.dtype}"
        )
    return main_grad


def mark_added(weight: Tensor) -> Tensor:
    """Tell Megatron that the gradient is in ``main_grad``, and give autograd one of zeros that takes no memory yet.

    The gradient must not be None: Megatron's hook on the parameter, which starts the reduction, would not run. It must
    be 0: a tied embedding adds its own gradient to it.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(1, 1).expand_as(weight)
