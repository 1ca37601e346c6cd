"""Statistics at a set of ids and the distributed Top-K against one unsharded float64 softmax, on 1, 2 and 4 ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

from megatron_dppo.head.vocab_topk import HeadStatistics, vocab_parallel_statistics, vocab_parallel_topk
from megatron_dppo.losses import binary_kl, binary_tv, topk_kl, topk_tv
from tests.distributed.collectives import recorded_collectives
from tests.distributed.spawn import run_distributed
from tests.distributed.vocab_cases import (
    SHARDS,
    Case,
    Problem,
    assert_near,
    cases,
    drawn_cases,
    exact_divergences,
    make_problem,
    reference,
    shard_of,
)

pytestmark = pytest.mark.distributed

WORLD = SHARDS
CASES = 72
# Errors relative to max(1, |value|): log p of a nearly certain token is no better than the sum of the row, around 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
GRAD_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def statistics(problem: Problem, group: dist.ProcessGroup | None, logits: Tensor | None = None) -> HeadStatistics:
    return vocab_parallel_statistics(
        shard_of(problem.logits, group) if logits is None else logits,
        problem.labels,
        group=group,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        ids=problem.ids,
        ids_valid=problem.valid,
    )


def topk(problem: Problem, group: dist.ProcessGroup | None, k: int) -> tuple[Tensor, Tensor]:
    case = problem.case
    return vocab_parallel_topk(
        shard_of(problem.logits, group), k, group=group, vocab_size=case.vocab_size, temperature=case.temperature
    )


def check_statistics(problem: Problem, group: dist.ProcessGroup | None) -> None:
    """Values, gradient of the shard, collectives and their bytes, the sum of all masses."""
    case, want = problem.case, reference(problem)
    size = 1 if group is None else group.size()
    where, number = f"{case} on {size} ranks", 8 if case.dtype == torch.float64 else 4
    shard = shard_of(problem.logits, group).requires_grad_()
    with recorded_collectives() as calls:
        got = statistics(problem, group, shard)
        weights = problem.weights.to(got.logprobs.dtype)
        (weights[0] @ got.logprobs + weights[1] @ got.entropy).backward()
    sizes = (number * case.rows, (3 + case.slots + 2) * number * case.rows)
    assert calls == ([("all_reduce MAX", sizes[0]), ("all_reduce SUM", sizes[1])] if size > 1 else []), where

    assert got.id_logprobs is not None and got.other_logprob is not None
    assert got.other_square is not None
    assert not got.other_logprob.requires_grad and not got.other_square.requires_grad
    in_set = torch.zeros_like(want.logp, dtype=torch.bool)
    for slot in range(case.slots):
        used = problem.valid[:, slot]
        in_set[used, problem.ids[used, slot]] = True
    rest = torch.where(in_set, 0.0, want.logp.exp())
    assert_near(got.other_square, rest.square().sum(1), TOLERANCE[case.dtype], where)
    tolerance = TOLERANCE[case.dtype]
    assert_near(got.logprobs, want.logprobs, tolerance, where)
    assert_near(got.entropy, want.entropy, 2 * tolerance, where)
    assert_near(got.id_logprobs, want.id_logprobs, tolerance, where)
    assert_near(got.other_logprob, want.other_logprob, tolerance, where)
    assert not ((want.other_logprob == -math.inf) ^ (got.other_logprob == -math.inf)).any(), where
    total = got.id_logprobs.exp().sum(1) + got.other_logprob.exp()
    assert_near(total, torch.ones_like(want.entropy), 4 * tolerance, where)
    assert shard.grad is not None and shard.grad.dtype == case.dtype
    assert_near(shard.grad, shard_of(want.grad, group), GRAD_TOLERANCE[case.dtype], where)
    assert_equal_on_all_ranks([got.logprobs, got.entropy, got.id_logprobs, got.other_logprob], group, where)


def check_topk(problem: Problem, group: dist.ProcessGroup | None) -> None:
    case, want = problem.case, reference(problem)
    size = 1 if group is None else group.size()
    where, number = f"{case} on {size} ranks", 8 if case.dtype == torch.float64 else 4
    with recorded_collectives() as calls:
        logprobs, ids = topk(problem, group, case.k)
    width = min(case.k, problem.logits.shape[1] // size)
    assert calls == ([("all_gather_into_tensor", (2 * width + 1) * number * case.rows)] if size > 1 else []), where
    assert ids.dtype == torch.int64 and torch.equal(ids, want.topk_ids), where
    assert logprobs.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_near(logprobs, want.logp.gather(1, ids), TOLERANCE[case.dtype], where)
    assert_equal_on_all_ranks([logprobs, ids], group, where)


def check_whole_vocabulary_is_exact(problem: Problem, group: dist.ProcessGroup | None) -> None:
    """K = V: nothing is left for ``other``, and the Top-K divergences are those of the full distributions."""
    case, want = problem.case, reference(problem)
    where = f"{case}, {group and group.size()} ranks"
    generator = torch.Generator().manual_seed(case.seed)
    order = torch.rand(case.rows, case.vocab_size, generator=generator).argsort(1)
    got = statistics(replace(problem, ids=order, valid=torch.ones_like(order, dtype=torch.bool)), group)
    assert got.id_logprobs is not None and got.other_logprob is not None
    assert (got.other_logprob == -math.inf).all(), where
    arguments = got.id_logprobs, problem.rollout.gather(1, order), torch.ones_like(order, dtype=torch.bool)
    exact_tv, exact_kl = exact_divergences(want.logp, problem.rollout)
    assert_near(topk_tv(*arguments, got.other_logprob), exact_tv, 4 * TOLERANCE[case.dtype], where)
    # The floor of the losses under the mass of `other`, 1e-12, may add that much times its logarithm.
    assert_near(topk_kl(*arguments, got.other_logprob), exact_kl, 4 * TOLERANCE[case.dtype] + 1e-10, where)


def check_order_of_divergences(problem: Problem, group: dist.ProcessGroup | None) -> None:
    """Binary <= Top-K <= exact on the union of TopK(mu, K) and the label, K slots and one for the label."""
    case, want, mu = problem.case, reference(problem), problem.rollout
    where = f"{case}, {group and group.size()} ranks"
    ids = torch.cat([mu.topk(case.k, dim=1).indices, problem.labels[:, None]], dim=1)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, -1] = (ids[:, :-1] != ids[:, -1:]).all(1)
    got = statistics(replace(problem, ids=ids, valid=valid), group)
    assert got.id_logprobs is not None
    arguments = got.id_logprobs, mu.gather(1, ids), valid, got.other_logprob
    own_mu = mu.gather(1, problem.labels[:, None]).squeeze(1)
    slack = 4 * TOLERANCE[case.dtype] + 1e-10
    exact_tv, exact_kl = exact_divergences(want.logp, mu)
    tv = topk_tv(*arguments)
    assert (binary_tv(got.logprobs, own_mu) <= tv + slack).all() and (tv <= exact_tv + slack).all(), where
    kl = topk_kl(*arguments)
    assert (kl <= exact_kl * (1 + slack) + slack).all(), where
    if case.dtype == torch.float64:  # 1 - pi(a) of a nearly certain token is known to a factor of 2 only in fp32
        assert got.other_logprob is not None
        above_floor = got.other_logprob > math.log(1e-12)  # below it the losses take another mass for `other`
        assert (~above_floor | (binary_kl(got.logprobs, own_mu) <= kl * (1 + slack) + slack)).all(), where


def check_permutation(problem: Problem, group: dist.ProcessGroup | None) -> None:
    """Entries that move to other shards, their ids with them, change nothing; equal logits of a Top-K apart."""
    case = problem.case
    where = f"{case}, {group and group.size()} ranks"
    to = torch.randperm(case.vocab_size, generator=torch.Generator().manual_seed(case.seed))
    logits = problem.logits.clone()
    logits[:, to] = problem.logits[:, : case.vocab_size]
    ids = torch.where(problem.valid, to[problem.ids.clamp(0, case.vocab_size - 1)], problem.ids)
    moved = replace(problem, logits=logits, labels=to[problem.labels], ids=ids)
    tolerance = 2 * TOLERANCE[case.dtype]
    for got, want in zip(statistics(moved, group)[:5], statistics(problem, group)[:5], strict=True):
        assert got is not None and want is not None
        assert_near(got.detach(), want.detach().double(), tolerance, where)
    (got_values, got_ids), (values, top) = topk(moved, group, case.k), topk(problem, group, case.k)
    assert_near(got_values, values.double(), tolerance, where)
    if case.style == "plain" and case.dtype == torch.float64:
        assert torch.equal(got_ids, to[top]), where


def assert_equal_on_all_ranks(tensors: list[Tensor], group: dist.ProcessGroup | None, where: str) -> None:
    if group is None:
        return
    mine = torch.cat([t.detach().double().flatten() for t in tensors])
    copies = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(copies, mine, group=group)
    assert all(torch.equal(copy, mine) for copy in copies), where


CHECKS = (
    check_statistics,
    check_topk,
    check_whole_vocabulary_is_exact,
    check_order_of_divergences,
    check_permutation,
)


def check_groups(rank: int, world_size: int, drawn: list[Case]) -> None:
    """Run all checks on one, two and four shards; groups of the same size share the cases."""
    for size in (1, 2, 4):
        group = None
        for start in range(0, world_size, size):
            created = dist.new_group(list(range(start, start + size)))
            group = created if start <= rank < start + size else group
        for case in drawn[rank // size :: world_size // size]:
            problem = make_problem(case)
            for check in CHECKS:
                check(problem, group)
        check_large_vocabulary(group)
        check_refusals(group)


def check_large_vocabulary(group: dist.ProcessGroup) -> None:
    """fp32 and a width at which sums round: the same bounds."""
    problem = make_problem(Case(9001, 2300, rows=16, slots=21, k=20, seed=1))
    check_statistics(problem, group)
    check_topk(problem, group)


def check_refusals(group: dist.ProcessGroup) -> None:
    """On every rank, also on those whose shard holds nothing of the row, and before any collective."""
    vocab_size = 4 * group.size() - 1
    logits, labels = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    valid = torch.ones(2, 3, dtype=torch.bool)
    ids = torch.tensor([[0, 1, 2], [2, vocab_size, 1]])
    with recorded_collectives() as calls:
        with pytest.raises(ValueError, match=rf"{vocab_size} in row 1, slot 1 .* \[0, {vocab_size}\)"):
            vocab_parallel_statistics(logits, labels, group=group, vocab_size=vocab_size, ids=ids, ids_valid=valid)
        with pytest.raises(ValueError, match=rf"from 1 to vocab_size = {vocab_size}, got {vocab_size + 1}"):
            vocab_parallel_topk(logits, vocab_size + 1, group=group, vocab_size=vocab_size)
    assert calls == []


def test_shards_on_one_two_and_four_ranks_equal_the_unsharded_float64_softmax() -> None:
    drawn = drawn_cases(CASES)
    # The cases reach a K above the shard's size, and ranks with nothing but padding.
    assert any(c.k > c.shard for c in drawn) and any(1 < c.vocab_size <= 2 * c.shard for c in drawn)
    run_distributed(check_groups, WORLD, drawn, timeout=240)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(cases())
def test_without_a_group_there_is_no_collective_and_the_same_result(case: Case) -> None:
    problem = make_problem(case)
    for check in CHECKS:
        check(problem, None)


def test_other_mass_keeps_its_relative_precision_where_the_set_holds_almost_everything() -> None:
    logits = torch.full((1, 50), -30.0)
    logits[0, :2] = torch.tensor([5.0, 4.0])
    ids, valid = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    got = vocab_parallel_statistics(
        logits, torch.tensor([0]), group=None, vocab_size=50, ids=ids, ids_valid=valid
    ).other_logprob
    want = logits.double().log_softmax(1)[0, 2:].logsumexp(0)
    assert got is not None and float(got) == pytest.approx(float(want), rel=1e-6) and want < -30


def test_no_slots_leave_all_the_mass_to_other() -> None:
    ids, valid = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.bool)
    labels = torch.tensor([0, 1, 2])
    got = vocab_parallel_statistics(torch.randn(3, 8), labels, group=None, vocab_size=7, ids=ids, ids_valid=valid)
    assert got.id_logprobs is not None and got.id_logprobs.shape == (3, 0)
    assert got.other_logprob is not None and got.other_logprob.tolist() == [0, 0, 0]
    assert vocab_parallel_statistics(torch.randn(3, 8), labels, group=None, vocab_size=7)[2:] == (None,) * 5


def test_ids_save_no_second_large_tensor_for_backward() -> None:
    logits = torch.randn(16, 64).bfloat16().requires_grad_()
    ids = torch.arange(4).expand(16, 4)
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        vocab_parallel_statistics(logits, ids[:, 0], group=None, vocab_size=60, ids=ids, ids_valid=ids >= 0)
    assert [t.data_ptr() for t in saved if t.numel() >= 16 * 60] == [logits.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_topk_of_many_equal_logits_takes_the_lowest_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[0, 4000:4010] = 1
    logits[1] = -math.inf
    logits[1, 7] = -3
    logits[2, ::2] = -0.0  # equal to 0
    _, ids = vocab_parallel_topk(logits, 20, group=None, vocab_size=4900)
    assert ids[0].tolist() == [*range(4000, 4010), *range(10)]
    assert ids[1].tolist() == [7, *range(7), *range(8, 20)]
    assert ids[2].tolist() == list(range(20))


def test_bad_arguments_are_named() -> None:
    logits, labels = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    ids, valid = torch.tensor([[0, 1, 2], [5, 3, 5]]), torch.ones(2, 3, dtype=torch.bool)

    def call(ids: Tensor | None, valid: Tensor | None) -> HeadStatistics:
        return vocab_parallel_statistics(logits, labels, group=None, vocab_size=7, ids=ids, ids_valid=valid)

    with pytest.raises(ValueError, match="row 1, slots 0 and 2"):
        call(ids, valid)
    with pytest.raises(ValueError, match="-1 in row 0, slot 0"):
        call(ids - 1, valid)
    with pytest.raises(ValueError, match="both or neither"):
        call(ids, None)
    with pytest.raises(ValueError, match="both or neither"):
        call(None, valid)
    with pytest.raises(ValueError, match=r"int64 ids \[T, S\].*int32"):
        call(ids.int(), valid)
    with pytest.raises(ValueError, match=r"int64 ids \[T, S\].*\(1, 3\)"):
        call(ids[:1], valid[:1])
    with pytest.raises(ValueError, match=r"bool ids_valid \(2, 3\), got torch\.bool \(2, 2\)"):
        call(ids, valid[:, :2])
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        call(ids, valid.float())
    for k in (0, 8):
        with pytest.raises(ValueError, match=f"1 to vocab_size = 7, got {k}"):
            vocab_parallel_topk(logits, k, group=None, vocab_size=7)
    with pytest.raises(ValueError, match=r"\[T, V_local\], got torch.int64"):
        vocab_parallel_topk(logits.long(), 2, group=None, vocab_size=7)
