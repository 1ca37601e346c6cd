"""Cases of an output layer with its hidden states, and one unsharded float64 reference for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.stats import loss_inputs
from megatron_dppo.head.vocab_topk import HeadStatistics
from megatron_dppo.losses import policy_objective
from megatron_dppo.types import LossInputs, LossNeeds, SamplingMask, TokenTargets

SHARDS = 4
TOKEN_LOSSES: dict[str, LossConfig] = {
    "dppo_binary_tv": LossConfig(name="dppo_binary_tv"),
    "dppo_binary_kl": LossConfig(name="dppo_binary_kl"),
    "dppo_topk_tv": LossConfig(name="dppo_topk_tv", topk=5),
    "dppo_topk_kl": LossConfig(name="dppo_topk_kl", ratio_cap="off", topk=5),
    "dppo_topk_tv evicting": LossConfig(name="dppo_topk_tv", topk=5, topk_eviction=True),
    "dppo_topk_kl evicting": LossConfig(name="dppo_topk_kl", ratio_cap="off", topk=5, topk_eviction=True),
    "dppo_topk_tv predictive": LossConfig(name="dppo_topk_tv", topk=5, direction="predictive"),
    "dppo_topk_kl predictive": LossConfig(name="dppo_topk_kl", ratio_cap="off", topk=5, direction="predictive"),
    "dppo_topk_kl predictive flat": LossConfig(
        name="dppo_topk_kl", ratio_cap="off", topk=5, direction="predictive", tail="uniform"
    ),
    "score centering": LossConfig(name="score_centering", topk=5),
    "score centering, IS mask": LossConfig(name="score_centering", topk=5, centering="mask"),
    "score centering, entropy": LossConfig(name="score_centering", topk=5, centering="none", entropy_coef=0.2),
    "dppo_binary_tv centered": LossConfig(name="dppo_binary_tv", topk=5, centering=True),
    "dppo_topk_kl predictive centered": LossConfig(name="dppo_topk_kl", topk=5, direction="predictive", centering=True),
    "spo": LossConfig(name="spo"),
    "grpo centered": LossConfig(name="grpo", topk=5, centering=True),
    "grpo": LossConfig(name="grpo"),
    "pg_is": LossConfig(name="pg_is"),
    "cispo": LossConfig(name="cispo"),
    "minirl": LossConfig(name="minirl"),
    "KL penalty k1": LossConfig(name="dppo_binary_tv", kl_coef=0.3, kl_estimator="k1", kl_target="reference"),
    "KL penalty k3": LossConfig(
        name="dppo_binary_tv", ratio_cap="off", kl_coef=0.02, kl_estimator="k3", kl_target="reference"
    ),
    "entropy bonus": LossConfig(name="dppo_binary_kl", entropy_coef=0.2),
}
"""Every kind of loss in which a token's term depends on that token alone. Without a cap where the capped terms nearly
cancel: the roundings of the terms to bf16, which every method has, then count against a small sum."""


def needs_of(config: LossConfig) -> LossNeeds:
    """Return the needs of a loss beside the statistics of every loss."""
    return policy_objective(config).needs


Leaves = tuple[Tensor, Tensor, Tensor | None]
LOGPROB_BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
GRAD_BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4}
"""Error of the gradients of hidden states and weight, by norm. Processors sum matrix products in different orders."""


@dataclass(frozen=True)
class HeadCase:
    """Sizes and options of a case; everything else follows from the seed."""

    tokens: int = 13
    hidden: int = 24
    vocab_size: int = 61
    shard: int = 16
    """rows of each of the four smallest shards of the weight; the last ones may be padding, partly or wholly"""
    k: int = 5
    dtype: torch.dtype = torch.float32
    temperature: float = 0.7
    bias: bool = False
    holes: bool = False
    """a third of the entries have probability 0, by a bias of -inf"""
    first: float = 0.0
    """added to the logits of the first of the four shards, by the bias; -inf = none of its entries is possible"""
    offset: float = 0.0
    """added to all logits, by the bias"""
    scale: float = 1.0
    filtered: bool = False
    """all rows but every fifth have a sampling mask, of one id up to all"""
    seed: int = 0

    def but(self, **changes: object) -> HeadCase:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class HeadProblem:
    """Equal on all ranks; padding would spoil the softmax, unused slots hold anything."""

    case: HeadCase
    hidden: Tensor
    weight: Tensor
    """[SHARDS * shard, H]"""
    bias: Tensor | None
    targets: TokenTargets
    upstream: Tensor
    """[2, T] float64 of the log-probabilities and of the entropy in the scalar that is differentiated"""

    @property
    def ids(self) -> Tensor:
        assert self.targets.rollout_topk_ids is not None
        return self.targets.rollout_topk_ids[:, :-1].long()

    def leaves(self, group: dist.ProcessGroup | None) -> Leaves:
        """Hidden states, and this rank's shard of weight and bias."""
        shard, bias = shard_of(self.weight, group), None if self.bias is None else shard_of(self.bias, group)
        return (
            self.hidden.clone().requires_grad_(),
            shard.requires_grad_(),
            None if bias is None else bias.requires_grad_(),
        )


def shard_of(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    height = len(rows) // size
    return rows[rank * height : (rank + 1) * height].clone()


def make_head_problem(case: HeadCase) -> HeadProblem:
    generator = torch.Generator().manual_seed(case.seed)
    tokens, vocab, rows = case.tokens, case.vocab_size, SHARDS * case.shard

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = (normal(tokens, case.hidden) * case.scale).to(case.dtype)
    weight = (2 * normal(rows, case.hidden) / math.sqrt(case.hidden)).to(case.dtype)
    weight[vocab:] = 50.0
    bias = None
    if case.bias or case.holes or case.offset or case.first:
        bias = (normal(rows) + case.offset).to(case.dtype)
        if case.holes:
            bias[:vocab][torch.rand(vocab, generator=generator) < 0.3] = -math.inf
            bias[0] = 0.0
        bias[: case.shard] += case.first
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    if case.holes or case.first:
        assert bias is not None
        possible = bias[:vocab].isfinite().nonzero().squeeze(1)
        labels = possible[labels % len(possible)]
    return HeadProblem(case, hidden, weight, bias, make_targets(case, labels, generator), normal(2, tokens))


def make_targets(case: HeadCase, labels: Tensor, generator: torch.Generator) -> TokenTargets:
    """Top-K ids as an engine reports them: the label in slot K only where it is not among the K before it."""
    tokens, vocab, k = case.tokens, case.vocab_size, case.k
    rollout = (2 * torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)).log_softmax(1)
    ids = torch.rand(tokens, vocab, generator=generator).argsort(1)[:, :k]
    ids[::3, 0] = torch.where((ids[::3] == labels[::3, None]).any(1), ids[::3, 0], labels[::3])
    ids[1::4, k // 2 :] = -1
    inside = (ids == labels[:, None]).any(1)
    ids = torch.cat([ids, torch.where(inside, -1, labels)[:, None]], 1)
    rollout_topk = rollout.gather(1, ids.clamp(min=0)).float()
    rollout_topk[2::5, 1] = -math.inf  # the engine never samples this id
    return TokenTargets(
        labels=labels,
        loss_mask=torch.rand(tokens, generator=generator) < 0.8,
        advantages=torch.randn(tokens, generator=generator).round(),
        rollout_logprobs=rollout.gather(1, labels[:, None]).squeeze(1).float(),
        rollout_topk_ids=ids.int(),
        rollout_topk_logprobs=rollout_topk,
        recomputed_logprobs=rollout.gather(1, labels[:, None]).squeeze(1).float() + 0.05,
        reference_logprobs=rollout.gather(1, labels[:, None]).squeeze(1).float() - 0.1,
        token_weights=torch.rand(tokens, generator=generator),
        sampling_mask=make_sampling_mask(case, labels, generator) if case.filtered else None,
    )


def make_sampling_mask(case: HeadCase, labels: Tensor, generator: torch.Generator) -> SamplingMask:
    """Random sets with the label in them, whose ids are in no order."""
    sets = []
    for row, label in enumerate(labels.tolist()):
        size = 0 if row % 5 == 4 else int(torch.randint(1, case.vocab_size + 1, (), generator=generator))
        order = torch.randperm(case.vocab_size, generator=generator)
        chosen = torch.cat([order[order != label][: max(size - 1, 0)], torch.tensor([label] * min(size, 1))])
        sets.append(chosen[torch.randperm(len(chosen), generator=generator)].int())
    return SamplingMask(torch.cat(sets), torch.tensor([len(ids) for ids in sets], dtype=torch.int32))


def cut(logits: Tensor, sampling_mask: SamplingMask | None) -> Tensor:
    """``[T, V]`` with a finite number of probability 0 outside the sets."""
    if sampling_mask is None:
        return logits
    outside = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in enumerate(sampling_mask.ids.split(sampling_mask.counts.tolist())):
        outside[row] = len(ids) > 0
        outside[row, ids.long()] = False
    return logits.masked_fill(outside, -1e5)


def full_leaves(problem: HeadProblem) -> Leaves:
    """Float64, unsharded, without padding; -inf in the bias becomes a finite number of probability 0."""
    vocab, bias = problem.case.vocab_size, problem.bias
    return (
        problem.hidden.double().clone().requires_grad_(),
        problem.weight.double()[:vocab].clone().requires_grad_(),
        None if bias is None else bias.double()[:vocab].clamp(min=-1e5).requires_grad_(),
    )


def full_statistics(problem: HeadProblem, leaves: Leaves) -> HeadStatistics:
    """torch's own softmax of the whole vocabulary, with autograd through everything."""
    hidden, weight, bias = leaves
    logits = hidden @ weight.T
    logits = cut(logits if bias is None else logits + bias, problem.targets.sampling_mask)
    logp = (logits / problem.case.temperature).log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    logprobs = logp.gather(1, problem.targets.labels[:, None]).squeeze(1)
    exact, valid = logp.masked_fill(logp < -1e4, -math.inf), problem.ids >= 0
    chosen = torch.cat([torch.where(valid, problem.ids, 0), problem.targets.labels[:, None]], 1)
    used = torch.nn.functional.pad(valid, (0, 1), value=True)
    in_set = torch.zeros(logp.shape).scatter_add(1, chosen, used.float()) > 0
    return HeadStatistics(
        logprobs,
        entropy,
        torch.where(valid, exact.gather(1, chosen[:, :-1]), -math.inf),
        exact.detach().masked_fill(in_set, -math.inf).logsumexp(1),
        exact.detach().masked_fill(in_set, -math.inf).exp().square().sum(1),
        None,
        None,
    )


def full_loss_inputs(problem: HeadProblem, leaves: Leaves) -> LossInputs:
    return loss_inputs(problem.targets, full_statistics(problem, leaves), problem.case.vocab_size)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the error of the whole tensor, by norm; NaN counts as infinite."""
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error


def assert_close(got: Tensor, want: Tensor, bound: float, where: str) -> None:
    """Relative to max(1, |value|)."""
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound, msg=lambda text: f"{where}: {text}")


def check_gradients(
    problem: HeadProblem,
    leaves: Leaves,
    full: Leaves,
    group: dist.ProcessGroup | None,
    where: str,
    factor: float = 1.0,
) -> None:
    """This shard's gradients against the unsharded ones; the parts of hidden summed over the group as a caller does."""
    bound = factor * GRAD_BOUND[problem.case.dtype]
    hidden, weight, bias = (None if x is None else x.grad for x in leaves)
    assert hidden is not None and weight is not None and full[0].grad is not None and full[1].grad is not None
    total = hidden.double()
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    assert relative_error(total, full[0].grad) <= bound, (where, "hidden", relative_error(total, full[0].grad))
    padding = SHARDS * problem.case.shard - problem.case.vocab_size
    want = shard_of(torch.nn.functional.pad(full[1].grad, (0, 0, 0, padding)), group)
    # The shard's error counts against the whole gradient: a shard of padding has none of its own.
    error = float((weight.double() - want).norm() / full[1].grad.norm())
    assert error <= bound, (where, "weight", error)
    if bias is not None:
        assert full[2] is not None and full[2].grad is not None
        want = shard_of(torch.nn.functional.pad(full[2].grad, (0, padding)), group)
        # Positive and negative terms cancel in its sum, and leave the rounding of each.
        assert float((bias.double() - want).norm() / full[2].grad.norm()) <= 2 * bound, (where, "bias")
