"""The task that every method solves: DPPO's loss of N tokens from hidden states, with the gradients of head and input.

As in training with an untied head, the weight's gradient ends in Megatron's fp32 ``main_grad``: a method adds it there
itself, or ``add_to_main_grad`` does, as Megatron's hook on the parameter.

The head has V entries, split evenly over the tensor-parallel group. Rows of three kinds, so that no rounding can move a
token over a threshold of the trust region and with it the gradient: on policy (divergence about 0.01), off policy
(above 0.3), and a given share of zero advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.stats import RowPlan
from megatron_dppo.losses import policy_loss
from megatron_dppo.types import LossInputs, LossOutput, TokenTargets

_ROWS = 64
"""Rows at a time while the task is made."""


@dataclass(frozen=True)
class Size:
    """N tokens, vocabulary V, hidden size H, K candidates."""

    tokens: int
    vocab: int
    hidden: int
    topk: int
    dtype: torch.dtype = torch.bfloat16
    zero_share: float = 0.0
    entropy_gradient: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"N={self.tokens} V={self.vocab} H={self.hidden} K={self.topk} {kind}"


@dataclass(frozen=True)
class Task:
    """One rank's share of the problem."""

    hidden: Tensor
    """Leaf. Shape ``[N, H]``."""
    weight: Tensor
    """Leaf with ``main_grad``. Shape ``[V / ranks, H]``."""
    targets: TokenTargets
    vocab_size: int
    group: ProcessGroup | None = None
    temperature: float = 1.0
    entropy_gradient: bool = False
    plan: RowPlan | None = None
    """Rows with a loss and rows with a gradient, known on the host before the forward pass."""
    chunk_tokens: int | None = None
    """Chunk size of our head; None lets it choose."""
    record: list[LossInputs] | None = None
    """Inputs of each call of the loss; None disables recording."""

    @property
    def first(self) -> int:
        """Global id of this shard's first entry."""
        return 0 if self.group is None else self.group.rank() * len(self.weight)

    @property
    def ids(self) -> Tensor:
        """Candidates of the rollout. Shape ``[N, K]``, int64."""
        assert self.targets.rollout_topk_ids is not None
        return self.targets.rollout_topk_ids[:, :-1].long()

    def fresh(self) -> Task:
        """Return a task with the same values in new leaves without gradients."""
        hidden = self.hidden.detach().clone().requires_grad_()
        return replace(self, hidden=hidden, weight=_with_main_grad(self.weight.detach().clone()))

    def shard(self, group: ProcessGroup) -> Task:
        """Return this rank's share of the task."""
        rows = self.vocab_size // group.size()
        shard_weight = self.weight.detach()[group.rank() * rows : (group.rank() + 1) * rows].clone()
        return replace(self, weight=_with_main_grad(shard_weight), group=group)


@dataclass(frozen=True)
class Statistics:
    """Statistics of the policy at each token; None if the method does not offer them."""

    logprobs: Tensor
    entropy: Tensor | None = None
    id_logprobs: Tensor | None = None
    """Log-probabilities at the candidates. Shape ``[N, K]``."""
    other_logprob: Tensor | None = None


Loss = Callable[[LossInputs], LossOutput]


def token_loss(task: Task, with_ids: bool) -> Loss:
    """Return DPPO-TopK-TV if the method has the candidates, else DPPO-Binary-TV; optional entropy bonus of 0.01."""
    entropy_coef = 0.01 if task.entropy_gradient else 0.0
    if with_ids:
        config = LossConfig(name="dppo_topk_tv", topk=task.ids.shape[1], entropy_coef=entropy_coef)
    else:
        config = LossConfig(name="dppo_binary_tv", entropy_coef=entropy_coef)

    def loss(inputs: LossInputs) -> LossOutput:
        if task.record is not None:
            task.record.append(inputs)
        return policy_loss(inputs, config)

    return loss


def compute_loss(task: Task, statistics: Statistics) -> LossOutput:
    """Compute the loss of a method's statistics, with the same code for every method."""
    targets = task.targets
    assert targets.rollout_topk_ids is not None
    topk = None
    if statistics.id_logprobs is not None:
        topk = torch.cat([statistics.id_logprobs.detach(), statistics.logprobs.detach()[:, None]], 1)
    entropy = statistics.entropy if statistics.entropy is None or task.entropy_gradient else statistics.entropy.detach()
    inputs = LossInputs(
        logprobs=statistics.logprobs,
        entropy=entropy,
        advantages=targets.advantages,
        loss_mask=targets.loss_mask,
        rollout_logprobs=targets.rollout_logprobs,
        topk_logprobs=topk,
        rollout_topk_logprobs=None if topk is None else targets.rollout_topk_logprobs,
        topk_valid=None if topk is None else targets.rollout_topk_ids >= 0,
        topk_other_logprob=statistics.other_logprob,
    )
    return token_loss(task, topk is not None)(inputs)


def make_task(size: Size, device: torch.device | str = "cpu", seed: int = 0) -> Task:
    """Random hidden states and head with logits of deviation 2; the rollout's candidates are near the policy's."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 / size.hidden**0.5
    hidden = torch.randn(size.tokens, size.hidden, generator=generator).to(size.dtype)
    weight = (torch.randn(size.vocab, size.hidden, generator=generator) * scale).to(size.dtype)
    wide = weight.float().t()
    rows = [_rollout(hidden[at : at + _ROWS].float() @ wide, size.topk, generator) for at in _starts(size.tokens)]
    ids, logprobs = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
    # Half of the sampled tokens stand among the candidates, where slot K is unused; the others take slot K.
    labels = torch.where(torch.arange(size.tokens) % 2 == 0, ids[:, 0], ids[:, -1])
    ids[::2, -1] = -1
    at_label = torch.where(torch.arange(size.tokens) % 2 == 0, logprobs[:, 0], logprobs[:, -1])
    signs = torch.where(torch.rand(size.tokens, generator=generator) < 0.5, -1.0, 1.0)
    idle = torch.randperm(size.tokens, generator=generator) < round(size.zero_share * size.tokens)
    targets = TokenTargets(
        labels=labels.to(device),
        loss_mask=torch.ones(size.tokens, dtype=torch.bool, device=device),
        advantages=torch.where(idle, 0.0, signs).to(device),
        rollout_logprobs=at_label.to(device),
        rollout_topk_ids=ids.int().to(device),
        rollout_topk_logprobs=logprobs.to(device),
    )
    return _task(hidden.to(device), weight.to(device), targets, size)


def quick_task(size: Size, device: torch.device | str = "cpu", seed: int = 0) -> Task:
    """Random inputs of any size, made on the device: for times and peaks, which do not depend on the values."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=size.dtype)

    # Ids far apart are distinct, and hit every shard alike.
    start = torch.randint(size.vocab, (size.tokens, 1), generator=generator, device=device)
    ids = (start + torch.arange(size.topk + 1, device=device) * (size.vocab // (size.topk + 1))) % size.vocab
    signs = torch.rand(size.tokens, generator=generator, device=device).sub(0.5).sign()
    idle = torch.arange(size.tokens, device=device) * 7919 % size.tokens < size.zero_share * size.tokens
    level = torch.full((size.tokens, size.topk + 1), 1 / size.vocab, device=device).log()
    targets = TokenTargets(
        labels=ids[:, -1],
        loss_mask=torch.ones(size.tokens, dtype=torch.bool, device=device),
        advantages=torch.where(idle, 0.0, signs),
        rollout_logprobs=level[:, -1].contiguous(),
        rollout_topk_ids=ids.int(),
        rollout_topk_logprobs=level,
    )
    return _task(
        random(size.tokens, size.hidden), random(size.vocab, size.hidden).mul_(size.hidden**-0.5), targets, size
    )


def _task(hidden: Tensor, weight: Tensor, targets: TokenTargets, size: Size) -> Task:
    # An entropy bonus pulls at every token.
    advantages = None if size.entropy_gradient else targets.advantages.cpu()
    return Task(
        hidden.requires_grad_(),
        _with_main_grad(weight),
        targets=targets,
        vocab_size=size.vocab,
        entropy_gradient=size.entropy_gradient,
        plan=RowPlan.of(targets.loss_mask.cpu(), advantages, hidden.device),
    )


def _with_main_grad(weight: Tensor) -> Tensor:
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    return weight.requires_grad_()


def add_to_main_grad(weight: Tensor) -> None:
    """Add the weight's gradient to ``main_grad`` unless the method did, and drop it.

    As ``DistributedDataParallel._make_backward_post_hook`` of Megatron Core does.
    """
    if not getattr(weight, "grad_added_to_main_grad", False):
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    weight.grad = None


def _rollout(logits: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Candidates and one entry outside them ``[n, K+1]``, and the rollout's log-probabilities there."""
    logprobs = logits.log_softmax(1)
    values, ids = logprobs.topk(k + 1, dim=1)
    near = values + 0.01 * torch.randn(values.shape, generator=generator)
    far = values.exp().mul(0.01).add(0.3 * (torch.arange(k + 1) == 0)).log()
    off_policy = torch.arange(len(values)) % 8 == 7
    # The far policy is certain of the first candidate, so the sampled token or the whole set differs by 0.3.
    far[:, -1] = torch.log(torch.tensor(0.6))
    return ids, torch.where(off_policy[:, None], far, near)


def _starts(tokens: int) -> range:
    return range(0, tokens, _ROWS)
