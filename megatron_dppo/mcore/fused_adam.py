"""Apex FusedAdam's contract on plain torch operations.

Megatron takes Adam from Transformer Engine or Apex and falls back to ``torch.optim.AdamW``. That fallback cannot be
checkpointed: it keeps ``step`` per parameter, which Megatron's distributed-optimizer checkpoints either miss
(KeyError 'step') or share between parameters (the next step after a load differs). This class keeps ``step`` in the
parameter group, as Apex does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay; state = ``exp_avg, exp_avg_sq``, ``step`` in the group.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        adam_w_mode: True = decoupled weight decay (AdamW), False = L2 added to the gradient.
        weight_decay: coefficient of either.
        kernel_options: what later versions of Megatron pass to the CUDA kernels (``capturable``, ...); no effect here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **kernel_options: Any,
    ) -> None:
        del kernel_options
        self.adam_w_mode = adam_w_mode
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        if group["weight_decay"]:
            if self.adam_w_mode:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            else:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        step = group["step"]
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, correction2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, first, denominator, -group["lr"] / correction1)
