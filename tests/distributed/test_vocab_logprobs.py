"""Vocabulary-parallel statistics against one unsharded float64 softmax, on groups of 1, 2 and 4 real processes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.vocab_topk import vocab_parallel_statistics
from megatron_dppo.losses.dppo import dppo_loss
from megatron_dppo.types import LossInputs
from tests.distributed.collectives import recorded_collectives
from tests.distributed.spawn import run_distributed

WORLD = 4
TOKENS = 24
TRAPS = json.loads((Path(__file__).parents[1] / "data" / "dppo_cases.json").read_text())["traps"]


@dataclass(frozen=True)
class Case:
    """``padded`` is the vocabulary with padding, divisible by 4."""

    vocab_size: int = 37
    padded: int = 40
    temperature: float = 1.0
    dtype: torch.dtype = torch.float64
    holes: bool = False
    """some logits are -inf, among them a whole shard's, and one label's"""


CASES = (
    Case(),
    Case(temperature=0.6),
    Case(vocab_size=40),
    Case(vocab_size=5, padded=16),  # the last ranks hold nothing but padding
    Case(holes=True),
    Case(dtype=torch.float32),
    Case(dtype=torch.float32, temperature=1.7, holes=True),
    Case(dtype=torch.bfloat16, temperature=0.8),
)

pytestmark = pytest.mark.distributed
# relative, absolute; the gradient of bf16 logits is itself bf16
VALUE_TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-6, 2e-6)}
GRAD_TOLERANCE = {torch.float64: (1e-11, 1e-12), torch.float32: (1e-5, 2e-6), torch.bfloat16: (5e-3, 2e-6)}


@dataclass(frozen=True)
class Problem:
    """Everything that all ranks share; the padded entries hold large numbers that would spoil the softmax."""

    logits: Tensor
    labels: Tensor
    advantages: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    entropy_weight: Tensor


def make_problem(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(7)
    logits = 1.5 * torch.randn(TOKENS, case.padded, generator=generator, dtype=torch.float64)
    logits[:, case.vocab_size :] = 50.0
    labels = torch.randint(0, case.vocab_size, (TOKENS,), generator=generator)
    labels[0], labels[1] = 0, case.vocab_size - 1
    if case.holes:
        logits[2:8, : case.padded // 4] = -math.inf
        logits[8, int(labels[8]) - 1] = -math.inf
        logits[9, int(labels[9])] = -math.inf
    logits = logits.to(case.dtype)
    z = logits.double()[:, : case.vocab_size] / case.temperature
    log_pi = z.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    noise = 0.8 * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    return Problem(
        logits=logits,
        labels=labels,
        advantages=torch.randn(TOKENS, generator=generator, dtype=torch.float64),
        loss_mask=torch.rand(TOKENS, generator=generator) > 0.2,
        rollout_logprobs=(log_pi.clamp(min=-20) + noise).clamp(max=-1e-3),
        entropy_weight=torch.randn(TOKENS, generator=generator, dtype=torch.float64),
    )


def loss_of(problem: Problem, logprobs: Tensor) -> Tensor:
    """DPPO, with thresholds that a few of the tokens break."""
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=problem.advantages,
        loss_mask=problem.loss_mask,
        rollout_logprobs=problem.rollout_logprobs,
    )
    config = LossConfig(divergence_threshold_low=5e-3, divergence_threshold_high=5e-3)
    output = dppo_loss(inputs, config)
    assert 0 < int(output.keep_mask.sum()) < int(output.num_tokens)
    return output.loss_sum


def reference(case: Case, problem: Problem, *, loss: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and the gradient of the logits, unsharded in float64 with torch's own softmax."""
    logits = problem.logits.double().requires_grad_()
    logp = (logits[:, : case.vocab_size] / case.temperature).log_softmax(-1)
    logprobs = logp.gather(1, problem.labels[:, None]).squeeze(1)
    entropy = torch.special.entr(logp.exp()).sum(1)
    if loss:
        loss_of(problem, logprobs).backward()
    else:
        # entr has a gradient of infinity at 0; the true one of the logits, p (log p + H), is 0 there
        p = logp.detach().exp()
        grad = -problem.entropy_weight[:, None] * torch.where(p > 0, p * (logp + entropy[:, None]), 0.0).detach()
        grad = grad - p * problem.entropy_weight[:, None].square()
        grad.scatter_add_(1, problem.labels[:, None], problem.entropy_weight[:, None].square())
        logits.grad = torch.nn.functional.pad(grad / case.temperature, (0, case.padded - case.vocab_size))
    assert logits.grad is not None
    return logprobs.detach(), entropy.detach(), logits.grad


def assert_near(got: Tensor, want: Tensor, tolerance: tuple[float, float], where: str) -> None:
    rtol, atol = tolerance
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")


def check_case(case: Case, group: dist.ProcessGroup | None, *, loss: bool) -> None:
    """Values, gradient of this rank's shard, number of collectives, and equality over the ranks."""
    problem = make_problem(case)
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    width = case.padded // size
    shard = problem.logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    where = f"{case} on {size} ranks, loss={loss}"
    number = 8 if case.dtype == torch.float64 else 4
    want_calls = [("all_reduce MAX", number * TOKENS), ("all_reduce SUM", 3 * number * TOKENS)] if size > 1 else []
    with recorded_collectives() as calls:
        logprobs, entropy, *_ = vocab_parallel_statistics(
            shard, problem.labels, group=group, vocab_size=case.vocab_size, temperature=case.temperature
        )
        assert calls == want_calls, where
        if loss:
            loss_of(problem, logprobs).backward()
        else:
            w = problem.entropy_weight.to(logprobs.dtype)
            torch.autograd.backward([logprobs, entropy], [w.square(), w])
        assert calls == want_calls, where

    want_logprobs, want_entropy, want_grad = reference(case, problem, loss=loss)
    assert logprobs.dtype == entropy.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_near(logprobs, want_logprobs, VALUE_TOLERANCE[case.dtype], where)
    assert_near(entropy, want_entropy, VALUE_TOLERANCE[case.dtype], where)
    assert shard.grad is not None and shard.grad.dtype == case.dtype
    assert_near(shard.grad, want_grad[:, rank * width : (rank + 1) * width], GRAD_TOLERANCE[case.dtype], where)
    assert torch.equal(shard.detach(), problem.logits[:, rank * width : (rank + 1) * width]), where
    first_padding = max(0, case.vocab_size - rank * width)
    assert not shard.grad[:, first_padding:].any(), where
    if group is not None:
        both = torch.stack([logprobs.detach(), entropy.detach()])
        copies = [torch.empty_like(both) for _ in range(size)]
        dist.all_gather(copies, both, group=group)
        assert all(torch.equal(copy, both) for copy in copies), where


def check_groups(rank: int, world_size: int) -> None:
    for size in (1, 2, 4):
        group = None
        for start in range(0, world_size, size):
            ranks = list(range(start, start + size))
            created = dist.new_group(ranks)
            group = created if rank in ranks else group
        for case in CASES:
            check_case(case, group, loss=False)
            check_case(case, group, loss=True)
        check_no_tokens(group)
        check_bad_label(group)


def check_no_tokens(group: dist.ProcessGroup) -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    logprobs, entropy, *_ = vocab_parallel_statistics(
        logits, torch.zeros(0, dtype=torch.int64), group=group, vocab_size=4 * group.size()
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,) and logits.grad is not None


def check_bad_label(group: dist.ProcessGroup) -> None:
    """Every rank refuses, before any collective, so none is left waiting."""
    padding = 4 * group.size() - 1
    with pytest.raises(ValueError, match=rf"outside the vocabulary \[0, {padding}\)"):
        vocab_parallel_statistics(torch.zeros(1, 4), torch.tensor([padding]), group=group, vocab_size=padding)


def test_shards_on_one_two_and_four_ranks_equal_the_unsharded_float64_softmax() -> None:
    run_distributed(check_groups, WORLD, timeout=120)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_group_there_is_no_collective_and_the_same_result(case: Case, loss: bool) -> None:
    check_case(case, None, loss=loss)


@pytest.mark.parametrize("vocab_size", [6, 8])
@pytest.mark.parametrize("output", [0, 1])
def test_gradient_is_the_finite_difference(vocab_size: int, output: int) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 5, 2])

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        return vocab_parallel_statistics(z, labels, group=None, vocab_size=vocab_size, temperature=0.7)[:2]

    assert torch.autograd.gradcheck(lambda z: both(z)[output], (logits,))


def test_the_only_large_saved_tensor_is_the_logits_themselves() -> None:
    logits = torch.randn(16, 64).bfloat16().requires_grad_()
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        vocab_parallel_statistics(logits, torch.zeros(16, dtype=torch.int64), group=None, vocab_size=60)
    large = [tensor for tensor in saved if tensor.numel() >= 16 * 60]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_a_large_common_offset_of_fp32_logits_does_not_blur_the_gradient() -> None:
    base = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    grads = []
    for offset in (0.0, 16384.0):
        logits = (base + offset).requires_grad_()
        logprobs, entropy, *_ = vocab_parallel_statistics(logits, torch.tensor([1]), group=None, vocab_size=4)
        (logprobs.sum() + entropy.sum()).backward()
        grads.append(logits.grad)
    assert torch.equal(grads[0], grads[1])


def test_temperature_and_padding_traps_of_the_worked_cases() -> None:
    trap = TRAPS["temperature"]
    padded = torch.tensor([[*trap["z"], 0.0, 0.0]], dtype=torch.float64)
    for temperature, want in ((trap["T"], trap["mu_processed_a0"]), (1.0, TRAPS["padded_vocab"]["pi_a0_masked"])):
        logprobs, *_ = vocab_parallel_statistics(
            padded, torch.tensor([0]), group=None, vocab_size=8, temperature=temperature
        )
        assert float(logprobs.exp()) == pytest.approx(want, rel=1e-12)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 0.0], [-3e38, -3e38], [1e4, 1e4 - 1]], requires_grad=True)
    logprobs, entropy, *_ = vocab_parallel_statistics(logits, torch.tensor([0, 1, 0]), group=None, vocab_size=2)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == pytest.approx([0.0, -math.log(2), -math.log(1 + math.exp(-1))], rel=1e-6)
    assert entropy.tolist() == pytest.approx([0.0, math.log(2), 0.5822], abs=1e-4)
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_bad_arguments_are_named() -> None:
    logits, labels = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    call = vocab_parallel_statistics
    with pytest.raises(ValueError, match=r"outside the vocabulary \[0, 3\)"):
        call(logits, labels - 1, group=None, vocab_size=3)
    with pytest.raises(ValueError, match="vocab_size = 5"):
        call(logits, labels, group=None, vocab_size=5)
    with pytest.raises(ValueError, match="temperature must be"):
        call(logits, labels, group=None, vocab_size=4, temperature=0)
    with pytest.raises(ValueError, match=r"\(2, 4\), \(3,\)"):
        call(logits, torch.zeros(3, dtype=torch.int64), group=None, vocab_size=4)
    with pytest.raises(ValueError, match="int32"):
        call(logits, labels.int(), group=None, vocab_size=4)
