"""FusedAdam with Apex's interface on torch's fused kernels, for CPU and CUDA.

Reason: without Transformer Engine and Apex, Megatron uses ``torch.optim.AdamW``, which it cannot checkpoint. AdamW
    keeps ``step`` per parameter. Megatron's distributed-optimizer checkpoints miss it (KeyError 'step') or share it
    between parameters, so that the next update differs. This class keeps ``step`` in the parameter group, as Apex does.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with Apex's state: ``exp_avg`` and ``exp_avg_sq`` per parameter, ``step`` per group.

    The arguments are Apex's: ``adam_w_mode`` False is L2 regularization instead of decoupled weight decay. Options of
    CUDA kernels are ignored.
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
        if not bias_correction:
            raise ValueError(
                "Expected bias_correction = True for FusedAdam, got False: torch's fused kernels always correct."
            )
        self.adam_w_mode = adam_w_mode
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
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
        # All parameters share one tensor, which the kernel only reads.
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
