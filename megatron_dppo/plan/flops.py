"""FLOPs of one operation, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_dppo.errors import PlanError

_aten = torch.ops.aten


_FORWARD = frozenset({_aten._scaled_dot_product_flash_attention_for_cpu})
_BACKWARD = frozenset({_aten._scaled_dot_product_flash_attention_for_cpu_backward})


_PRODUCTS = frozenset({_aten.mm, _aten.addmm})


def dtype_of(func: Any, args: Sequence[Any], used: Sequence[Tensor]) -> torch.dtype:
    """In which an operation computes: that of its factors."""
    if func._overloadpacket in _PRODUCTS:
        return _factors(func._overloadpacket, args)[0].dtype
    return used[0].dtype if used else torch.float32


def _factors(packet: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return args[0:2] if packet is _aten.mm else args[1:3]  # type: ignore[return-value]


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations, a multiplication and an addition as two; 0 where torch counts none.

    Causal attention counts half of what torch counts: kernels leave the masked half out.

    Raises:
        PlanError: an attention or matrix operation without a formula.
    """
    packet = func._overloadpacket
    if packet in _FORWARD:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape)) // (1 + _is_causal(func, args, kwargs))
    if packet in _BACKWARD:
        shapes = [tensor.shape for tensor in args[:4]]
        return int(sdpa_backward_flop_count(*shapes)) // (1 + _is_causal(func, args, kwargs))
    if packet in _PRODUCTS:
        # Torch's own formula does not take the version with out_dtype.
        left, right = _factors(packet, args)
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = func._schema.name
    if any(part in name for part in ("attention", "::mm", "::bmm", "matmul", "conv", "gemm", "grouped_mm")):
        raise PlanError(f"no formula for the FLOPs of {name}: teach it to megatron_dppo/plan/flops.py")
    return 0


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``is_causal`` of a call of attention."""
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    place = [argument.name for argument in func._schema.arguments].index("is_causal")
    return bool(args[place]) if place < len(args) else False
