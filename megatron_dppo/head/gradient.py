"""Gradients of hidden states, weight and bias, accumulated over the chunks of a head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dppo.head.mixed_gemm import WeightGradient, bf16_products_are_fast, is_half
from megatron_dppo.head.row_plan import Rows, gradient_rows
from megatron_dppo.head.rows import VocabShard


class HeadGradient:
    """Accumulator of the gradients of a head, fed with the gradient of the logits chunk by chunk.

    On the CPU the gradients of several chunks in bf16 or fp16 are put together, because the product with the hidden
    states, and the sum that it is added to, cost less for many rows at a time. Otherwise that of a chunk overwrites its
    logits.

    ``needed`` is True for each of hidden, weight and bias that needs a gradient. The weight's is added to the fp32
    tensor ``main_grad``, or returned without it. ``scale`` is the factor of all gradients; None means 1.
    ``round_weight_gradient`` makes bf16 products of the weight's gradient on a CPU where they are faster.
    """

    def __init__(
        self,
        head: VocabShard,
        rows: Rows,
        hidden: Tensor,
        needed: tuple[bool, bool, bool],
        chunk: int,
        main_grad: Tensor | None,
        scale: Tensor | None = None,
        *,
        round_weight_gradient: bool = True,
    ) -> None:
        self.scale = scale
        self.rows = rows
        self.chunk = chunk
        self.wanted = any(needed)
        self._head = head
        self._source = hidden.detach()
        self.in_main_grad = needed[1] and main_grad is not None
        count, weight = rows.num_gradient, head.weight
        # A gradient of bf16 or fp16 fits into the memory of its fp32 logits. On the CPU it is collected for larger
        # products.
        in_place = weight.is_cuda or not is_half(weight.dtype) or not any(needed)
        at_a_time = chunk if in_place else gradient_rows(count, chunk, len(weight))
        self._room = None if in_place else weight.new_empty(min(at_a_time, count), len(weight))
        self._hidden = hidden.new_empty(count, hidden.shape[1]) if needed[0] else None
        self._weight = None
        if needed[1]:
            rounded = round_weight_gradient and bf16_products_are_fast()
            self._weight = WeightGradient(weight, -(-count // at_a_time), main_grad, rounded=rounded)
        self._bias = weight.new_zeros(len(weight), dtype=head.dtype) if needed[2] else None
        # Rows [_first, _last) of the plan are in ``_room`` and still to be multiplied.
        self._first = self._last = 0

    def next_output(self, logits: Tensor) -> Tensor:
        """Return the memory for the gradient of the next ``logits [n, W]``. Pass it to ``add`` once it is filled."""
        if self._room is None:
            # A row of two bytes a number fills the first half of the fp32 row that it replaces.
            return logits.view(self._head.weight.dtype)[:, : logits.shape[1]]
        if self._last - self._first + len(logits) > len(self._room):
            self._multiply(self._room)
        start = self._last - self._first
        return self._room[start : start + len(logits)]

    def add(self, dlogits: Tensor) -> None:
        """Add the gradient ``dlogits [n, W]`` of the next rows of the plan."""
        self._last += len(dlogits)
        if self._room is None:
            self._multiply(dlogits)

    def _multiply(self, dlogits: Tensor) -> None:
        first, last = self._first, self._last
        if first == last:
            return
        # The room may be longer than the rows in it.
        dlogits, self._first = dlogits[: last - first], last
        if self._hidden is not None:
            torch.mm(dlogits, self._head.weight, out=self._hidden[first:last])
        if self._weight is not None:
            self._weight.add(dlogits, self.rows.take(self._source, first, last))
        if self._bias is not None:
            self._bias += dlogits.sum(0, dtype=self._bias.dtype)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return this shard's part of the gradients of hidden ``[n, H]``, weight ``[W, H]`` and bias ``[W]``.

        None for a gradient that is not needed, and for a weight whose gradient went to ``main_grad``.
        """
        if self._room is not None:
            self._multiply(self._room)
            self._room = None
        return (
            self._hidden,
            None if self._weight is None else self._weight.result(),
            None if self._bias is None else self._bias.to(self._head.weight.dtype),
        )


def checked_main_grad(weight: Tensor, accumulate: bool) -> Tensor | None:
    """Return ``weight.main_grad``, which must be fp32, if the gradient must be added there, else None."""
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
    """Return ``loss_sum`` with the accumulated gradients attached. It can be differentiated once."""
    if not gradient.wanted:
        return loss_sum
    apply: Callable[..., Tensor] = _AttachGradient.apply
    return apply(hidden, weight, bias, loss_sum, gradient)


class _AttachGradient(torch.autograd.Function):
    """Autograd node that multiplies the accumulated gradients by the gradient of the sum."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss_sum: Tensor, gradient: HeadGradient
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradient.result(), gradient.scale
        ctx.rows, ctx.added_to = gradient.rows, weight if gradient.in_main_grad else None
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ValueError("the loss of dppo_head_loss can be differentiated once; it keeps no logits to do it again")
        if ctx.scale is not None:
            # The accumulated gradients contain ``grad_scale`` already.
            upstream = upstream / ctx.scale
        if ctx.added_to is not None:
            _check_one(upstream)
        # They leave the context here, so that a second backward pass raises instead of using scaled values.
        gradients, ctx.gradients = ctx.gradients, None
        grad_hidden, grad_weight, grad_bias = (_scaled(gradient, upstream) for gradient in gradients)
        if ctx.added_to is not None:
            grad_weight = mark_added(ctx.added_to)
        if grad_hidden is not None:
            grad_hidden = ctx.rows.spread(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None


def check_rest(stop: int, *gradients: Tensor | None) -> None:
    """Refuse a gradient that is not 0 in the rows from ``stop`` on."""
    for values in gradients:
        if values is None:
            continue
        wrong = (values[stop:] != 0).any()
        if values.is_cuda:
            torch._assert_async(~wrong, "the loss has a gradient in a row that the plan says has none")
        elif bool(wrong):
            raise ValueError(
                "the loss has a gradient in a row that plan says has none (an entropy bonus or a KL penalty?); "
                "make the plan without advantages"
            )


def _check_one(upstream: Tensor) -> None:
    if upstream.is_cuda:
        torch._assert_async(upstream == 1, "with accumulate_main_grad the gradient of the loss must be grad_scale")
    elif float(upstream) != 1:
        raise ValueError(
            f"with accumulate_main_grad the gradient of the loss must be grad_scale (1 by default), got "
            f"{float(upstream)} times that: weight.main_grad has the gradient already"
        )


def _scaled(gradient: Tensor | None, upstream: Tensor) -> Tensor | None:
    # On CUDA reading ``upstream`` would wait for the device; a product with 1 does not.
    if gradient is None or (not upstream.is_cuda and float(upstream) == 1):
        return gradient
    return gradient.mul_(upstream)
