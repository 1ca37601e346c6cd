"""Peers from their own packages, where one is installed: guarded, and named when it is not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from head_peers.registry import Method
from head_peers.task import Statistics, Task, compute_loss
from torch import Tensor

from megatron_dppo.types import LossOutput


def installed() -> tuple[list[Method], dict[str, str]]:
    """Return the methods whose package imports, and the import error of each other method."""
    methods, missing = [], {}
    for name, package, build, offers, gradients in _WHEELS:
        try:
            function = build(importlib.import_module(package))
        except Exception as error:  # a package may fail to import in any way: no Triton, another CUDA version
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            methods.append(Method(name, function, offers, gradients, equal_task=False, tensor_parallel=False))
    return methods, missing


def _liger(module: Any) -> Callable[[Task], LossOutput]:
    def forward(task: Task) -> LossOutput:
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            task.hidden, task.weight, task.targets.labels, task.temperature, -100, 1, True
        )
        return compute_loss(task, Statistics(-nll, entropy.float()))

    return forward


def _verl(module: Any) -> Callable[[Task], LossOutput]:
    def forward(task: Task) -> LossOutput:
        logprobs, entropy = module.linear_cross_entropy(
            task.hidden, task.weight, task.targets.labels, task.temperature, "none", None
        )
        return compute_loss(task, Statistics(logprobs, entropy))

    return forward


def _cce(module: Any) -> Callable[[Task], LossOutput]:
    """Adapt cut-cross-entropy without its filter, which skips blocks of small gradients."""

    def forward(task: Task) -> LossOutput:
        nll = module.linear_cross_entropy(
            task.hidden, task.weight, task.targets.labels, reduction="none", filter_eps=None
        )
        return compute_loss(task, Statistics(-nll.float()))

    return forward


def _quack(module: Any) -> Callable[[Task], LossOutput]:
    """Adapt quack. Its fused form has no per-token loss: the sum replaces it, which is less work."""

    def forward(task: Task) -> LossOutput:
        loss: Tensor = module.chunked_linear_cross_entropy(
            task.hidden, task.weight, task.targets.labels, reduction="sum"
        )
        mask = task.targets.loss_mask
        return LossOutput(loss_sum=loss, num_tokens=mask.sum(), keep_mask=mask, metrics={})

    return forward


_WHEELS: tuple[tuple[str, str, Callable[[Any], Callable[[Task], LossOutput]], str, str], ...] = (
    ("liger-kernel", "liger_kernel.ops.fused_linear_scaled_cross_entropy", _liger, "a d", "a d"),
    ("verl fused (wheel)", "verl.utils.kernel.linear_cross_entropy", _verl, "a d", "a d"),
    ("cut-cross-entropy", "cut_cross_entropy", _cce, "a", "a"),
    ("quack-kernels (sum only)", "quack.linear_cross_entropy", _quack, "a", "a"),
)
"""Name, module, adapter, statistics on offer, statistics with a gradient (letters as in ``Method.offers``)."""
