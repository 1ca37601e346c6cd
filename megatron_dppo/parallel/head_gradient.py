"""The gradients of hidden states, weight and bias, added up over the chunks of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        self._head, self.rows, self.in_main_grad = head, rows, needed[1] and main_grad is not None
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


def attach_gradient(
    loss_sum: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, gradient: HeadGradient
) -> Tensor:
    """``loss_sum`` with the gradients that ``gradient`` has of it; it can be differentiated once."""
    apply: Callable[..., Tensor] = _AttachGradient.apply
    return apply(hidden, weight, bias, loss_sum, gradient)


class _AttachGradient(torch.autograd.Function):
    """Multiplies gradients that exist already by that of the sum."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss_sum: Tensor, gradient: HeadGradient
    ) -> Tensor:
        ctx.gradients = (gradient.hidden(), gradient.weight(), gradient.bias())
        ctx.rows, ctx.added_to = gradient.rows, weight if gradient.in_main_grad else None
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ValueError("the loss of dppo_head_loss can be differentiated once; it keeps no logits to do it again")
        if ctx.added_to is not None:
            _check_one(upstream)
        (of_hidden, of_weight, of_bias), ctx.gradients = ctx.gradients, None
        of_hidden, of_weight, of_bias = (_scaled(x, upstream) for x in (of_hidden, of_weight, of_bias))
        if ctx.added_to is not None:
            of_weight = mark_added(ctx.added_to)
        return None if of_hidden is None else ctx.rows.spread(of_hidden), of_weight, of_bias, None, None


def _check_one(upstream: Tensor) -> None:
    if upstream.is_cuda:
        torch._assert_async(upstream == 1, "with accumulate_main_grad the gradient of the loss must be 1")
    elif float(upstream) != 1:
        raise ValueError(
            f"with accumulate_main_grad the gradient of the loss must be 1, got {float(upstream)}: weight.main_grad "
            "has the gradient already; scale the loss function instead"
        )


def _scaled(gradient: Tensor | None, upstream: Tensor) -> Tensor | None:
    if gradient is None or (not upstream.is_cuda and float(upstream) == 1):
        return gradient
    return gradient.mul_(upstream)
