"""Apex FusedAdam's contract on torch's own fused kernels, for CPU and CUDA.

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
        bias_correction: divide the moments by ``1 - beta ** step``; only True.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        adam_w_mode: True = decoupled weight decay (AdamW), False = L2 added to the gradient.
        weight_decay: coefficient of either.
        kernel_options: what later versions of Megatron pass to the CUDA kernels (``capturable``, ...); no effect here.

    Raises:
        ValueError: no bias correction, which torch's kernels always do.
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
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction = False, expected True; torch's fused kernels always correct")
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
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        # Of all parameters one tensor: it is read only.
        steps = [torch.full((), float(group["step"]), device=params[0].device)] * len(params)
        update(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
