"""The task in float64, written without any of the code that is measured, and the errors of a method against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from head_peers.task import Statistics, Task, compute_loss
from torch import Tensor

from megatron_dppo.types import LossInputs, LossOutput

_ROWS = 128


@dataclass(frozen=True)
class Reference:
    """Float64 results over the whole vocabulary."""

    logprobs: Tensor
    entropy: Tensor
    id_logprobs: Tensor
    keep_mask: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


@dataclass(frozen=True)
class Errors:
    """Errors against float64. For gradients: norm of the difference over the norm."""

    logprobs: float
    entropy: float | None
    id_logprobs: float | None
    grad_hidden: float
    grad_weight: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the errors for JSON."""
        return dict(vars(self))


def reference(task: Task, with_ids: bool) -> Reference:
    """Solve an unsharded task."""
    hidden, weight = task.hidden.detach().double(), task.weight.detach().double()
    rows = range(0, len(hidden), _ROWS)
    statistics = [_row_statistics(hidden[at : at + _ROWS] @ weight.t() / task.temperature, task, at) for at in rows]
    logprobs, entropy, id_logprobs, other = (torch.cat(column) for column in zip(*statistics, strict=True))
    leaves = (logprobs.requires_grad_(), entropy.requires_grad_())
    ids = (id_logprobs, other) if with_ids else (None, None)
    output = compute_loss(replace(task, record=None), Statistics(*leaves, *ids))
    output.loss_sum.backward()
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for at in rows:
        part = slice(at, at + _ROWS)
        logits = hidden[part] @ weight.t() / task.temperature
        slope = _logit_gradient(logits, task.targets.labels[part], *(_rows(leaf, part) for leaf in leaves))
        slope /= task.temperature
        grad_hidden[part] = slope @ weight
        grad_weight += slope.t() @ hidden[part]
    parts = (logprobs.detach(), entropy.detach(), id_logprobs, output.keep_mask)
    return Reference(*parts, grad_hidden, grad_weight)


def _rows(leaf: Tensor, part: slice) -> Tensor:
    return torch.zeros_like(leaf[part]) if leaf.grad is None else leaf.grad[part]


def _row_statistics(logits: Tensor, task: Task, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    part = slice(start, start + len(logits))
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    ids, labels = task.ids[part], task.targets.labels[part, None]
    outside = p.scatter(1, ids, 0.0).scatter(1, labels, 0.0).sum(1)
    return log_p.gather(1, labels).squeeze(1), -(p * log_p).sum(1), log_p.gather(1, ids), outside.log()


def _logit_gradient(logits: Tensor, labels: Tensor, grad: Tensor, grad_entropy: Tensor) -> Tensor:
    """Compute the gradient with autograd, so that no formula is shared with a method."""
    logits = logits.detach().requires_grad_()
    log_p = logits.log_softmax(1)
    value = grad @ log_p.gather(1, labels[:, None]).squeeze(1) - grad_entropy @ (log_p.exp() * log_p).sum(1)
    return torch.autograd.grad(value, logits)[0]


def measure_errors(run: Callable[[Task], LossOutput], task: Task, against: Reference) -> Errors:
    """Run a method on new leaves and compare; with chunks, rows follow the order of the task's plan.

    Raises:
        AssertionError: If the keep masks of method and reference differ.
    """
    record: list[LossInputs] = []
    leaves = replace(task.fresh(), record=record)
    output = run(leaves)
    differ = int((output.keep_mask != against.keep_mask).sum())
    assert not differ, f"{differ} tokens are on the other side of the trust region: the task has no margin"
    given = torch.cat([part.advantages for part in record])
    order = torch.arange(len(given), device=given.device)
    if not torch.equal(given, task.targets.advantages):
        assert task.plan is not None
        order = task.plan.rows.to(given.device)
        assert torch.equal(given, task.targets.advantages[order]), "the chunks are not in the order of the plan"
    recorded: dict[str, Any] = {
        name: None if getattr(record[0], name) is None else torch.cat([getattr(part, name).detach() for part in record])
        for name in ("logprobs", "entropy", "topk_logprobs")
    }
    grad_hidden, grad_weight = leaves.hidden.grad, leaves.weight.main_grad  # type: ignore[attr-defined]
    assert grad_hidden is not None
    if task.group is not None:
        grad_hidden = grad_hidden.float()
        dist.all_reduce(grad_hidden, group=task.group)
    shard_rows = slice(task.first, task.first + len(grad_weight))
    ids = None if recorded["topk_logprobs"] is None else recorded["topk_logprobs"][:, :-1]
    return Errors(
        logprobs=_largest(recorded["logprobs"], against.logprobs[order]),
        entropy=None if recorded["entropy"] is None else _largest(recorded["entropy"], against.entropy[order]),
        id_logprobs=None if ids is None else _largest(ids, against.id_logprobs[order]),
        grad_hidden=_relative(grad_hidden, against.grad_hidden),
        grad_weight=_relative(grad_weight, against.grad_weight[shard_rows]),
    )


def _largest(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).abs().max())


def _relative(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())
