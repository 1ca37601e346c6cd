"""Mode A of the fused head against an unsharded float64 softmax, in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.head.row_plan import RowPlan, default_chunk_tokens, gradient_rows
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.head.vocab_topk import HeadStatistics
from megatron_dppo.types import LossNeeds
from tests.distributed.head_cases import (
    LOGPROB_BOUND,
    HeadCase,
    HeadProblem,
    Leaves,
    assert_close,
    check_gradients,
    full_leaves,
    full_statistics,
    make_head_problem,
)

BASE = HeadCase()
CASES = [
    BASE,
    BASE.but(dtype=torch.float64),
    BASE.but(dtype=torch.bfloat16, tokens=64),
    BASE.but(dtype=torch.bfloat16, tokens=40, vocab_size=900, shard=240, hidden=32, k=20, temperature=1.0),
    BASE.but(bias=True, temperature=1.0),
    BASE.but(bias=True, dtype=torch.bfloat16, tokens=64),
    BASE.but(dtype=torch.float16, tokens=64),
    BASE.but(bias=True, dtype=torch.float16, tokens=40, vocab_size=900, shard=240, hidden=32, k=20),
    BASE.but(holes=True),
    BASE.but(holes=True, dtype=torch.float64, k=20),
    BASE.but(k=61, vocab_size=61),
    BASE.but(k=2, vocab_size=2, shard=1),
    BASE.but(vocab_size=1, shard=1, k=1),
    BASE.but(scale=12.0, dtype=torch.float64),
    BASE.but(offset=-4096.0, dtype=torch.float64),
    BASE.but(tokens=1),
]


def statistics(problem: HeadProblem, leaves: Leaves, **options: Any) -> HeadStatistics:
    hidden, weight, bias = leaves
    return vocab_parallel_head_stats(
        hidden,
        weight,
        problem.targets.labels,
        group=None,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        bias=bias,
        **{"ids": problem.ids, "ids_valid": problem.ids >= 0, "needs": LossNeeds(entropy_gradient=True), **options},
    )


def scalar(problem: HeadProblem, result: HeadStatistics) -> Tensor:
    upstream = problem.upstream.to(result.logprobs.dtype)
    return upstream[0] @ result.logprobs + upstream[1] @ result.entropy


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [None, 5])
def test_statistics_and_gradients_equal_float64(case: HeadCase, chunk: int | None) -> None:
    problem = make_head_problem(case)
    leaves, full = problem.leaves(None), full_leaves(problem)
    got, want = statistics(problem, leaves, chunk_tokens=chunk), full_statistics(problem, full)
    assert got.id_logprobs is not None and got.other_logprob is not None
    assert want.id_logprobs is not None and want.other_logprob is not None
    assert not got.id_logprobs.requires_grad and not got.other_logprob.requires_grad
    bound = LOGPROB_BOUND[case.dtype] * (5000 if case.offset else 1)
    for name in ("logprobs", "entropy", "id_logprobs", "other_logprob"):
        assert_close(getattr(got, name), getattr(want, name).detach(), 2 * bound, name)
    assert ((want.other_logprob == -math.inf) == (got.other_logprob == -math.inf)).all()
    scalar(problem, got).backward()
    scalar(problem, want).backward()
    if case.vocab_size > 1:  # of a single entry the gradient is 0
        check_gradients(problem, leaves, full, None, str(case), 5000 if case.offset else 1)


def test_fp32_logits_far_below_zero_lose_only_what_the_gemm_rounds() -> None:
    problem = make_head_problem(BASE.but(offset=-3000.0))
    leaves, full = problem.leaves(None), full_leaves(problem)
    got, want = statistics(problem, leaves), full_statistics(problem, full)
    assert_close(got.logprobs, want.logprobs.detach(), 1e-3, "3000 in fp32 has steps of 2.4e-4")
    scalar(problem, got).backward()
    scalar(problem, want).backward()
    check_gradients(problem, leaves, full, None, "offset", 1000)


def test_without_ids_and_without_an_entropy_gradient_nothing_else_changes() -> None:
    problem = make_head_problem(BASE)
    leaves, full = problem.leaves(None), full_leaves(problem)
    got = statistics(problem, leaves, ids=None, ids_valid=None, needs=LossNeeds())
    want = full_statistics(problem, full)
    assert got.id_logprobs is got.other_logprob is got.topk_ids is got.topk_logprobs is None
    assert not got.entropy.requires_grad
    assert_close(got.entropy, want.entropy.detach(), 1e-6, "entropy")
    (problem.upstream[0].float() @ got.logprobs).backward()
    (problem.upstream[0] @ want.logprobs).backward()
    check_gradients(problem, leaves, full, None, "no entropy")


def test_the_entropy_alone_can_be_differentiated() -> None:
    problem = make_head_problem(BASE)
    leaves, full = problem.leaves(None), full_leaves(problem)
    statistics(problem, leaves).entropy.sum().backward()
    full_statistics(problem, full).entropy.sum().backward()
    check_gradients(problem, leaves, full, None, "entropy")


def test_rows_outside_the_plan_are_zero_and_the_rest_is_as_without_a_plan() -> None:
    problem = make_head_problem(BASE.but(tokens=30))
    mask, advantages = problem.targets.loss_mask, problem.targets.advantages
    labels = torch.where(mask, problem.targets.labels, -100)
    problem = replace(problem, targets=replace(problem.targets, labels=labels))
    plan = RowPlan.of(mask, advantages)
    assert 0 < plan.num_gradient < len(plan.rows) < 30
    whole = replace(problem, targets=replace(problem.targets, labels=labels.clamp(min=0)))
    want = statistics(whole, whole.leaves(None))
    for chunk in (1, 4, 100):
        leaves, plain = problem.leaves(None), whole.leaves(None)
        got = statistics(problem, leaves, plan=plan, chunk_tokens=chunk)
        for name in ("logprobs", "entropy", "id_logprobs", "other_logprob"):
            values = getattr(got, name)
            torch.testing.assert_close(values[mask], getattr(want, name)[mask])
            assert (values[~mask] == 0).all()
        weights = torch.where(mask, advantages, 0.0)
        (weights @ got.logprobs + (weights * 0.3) @ got.entropy).backward()
        second = statistics(whole, plain)
        (weights @ second.logprobs + (weights * 0.3) @ second.entropy).backward()
        for mine, other in zip(leaves[:2], plain[:2], strict=True):
            assert mine.grad is not None and other.grad is not None
            torch.testing.assert_close(mine.grad, other.grad)


def test_rows_without_a_gradient_are_skipped_in_backward() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, bias = problem.leaves(None)
    plan = RowPlan(torch.tensor([4, 2, 7, 0]), 2)
    statistics(problem, (hidden, weight, bias), plan=plan).logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum(1).nonzero().squeeze(1).tolist() == [2, 4]


def test_a_plan_without_rows_gives_zeros_and_zero_gradients() -> None:
    problem = make_head_problem(BASE)
    leaves = problem.leaves(None)
    got = statistics(problem, leaves, plan=RowPlan(torch.zeros(0, dtype=torch.int64), 0), topk=3)
    assert (got.logprobs == 0).all() and got.topk_ids is not None and got.topk_ids.shape == (13, 3)
    got.logprobs.sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert (leaves[0].grad == 0).all() and (leaves[1].grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 61])
def test_the_policys_topk_is_that_of_the_full_vocabulary(dtype: torch.dtype, k: int) -> None:
    problem = make_head_problem(BASE.but(dtype=dtype, holes=True, seed=3))
    got = statistics(problem, problem.leaves(None), topk=k, chunk_tokens=4)
    hidden, weight, bias = full_leaves(problem)
    assert bias is not None and got.topk_ids is not None and got.topk_logprobs is not None
    logits = (hidden @ weight.T + bias).detach()
    logp = (logits / problem.case.temperature).log_softmax(1).masked_fill(logits < -1e4, -math.inf)
    order = logp.sort(dim=1, descending=True, stable=True)
    assert (got.topk_ids == order.indices[:, :k]).all()
    assert_close(got.topk_logprobs, order.values[:, :k], 2 * LOGPROB_BOUND[dtype], "topk")


def test_a_nan_row_affects_no_other_row() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, bias = problem.leaves(None)
    with torch.no_grad():
        hidden[3] = math.nan
    got = statistics(problem, (hidden, weight, bias))
    bad = torch.arange(13) == 3
    for values in got[:4]:
        assert values is not None and values.isnan().view(13, -1).any(1).eq(bad).all()


def test_a_row_without_a_distribution_is_nan() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, _ = problem.leaves(None)
    got = statistics(problem, (hidden, weight, torch.full((64,), -math.inf)))
    assert got.logprobs.isnan().all() and got.entropy.isnan().all()


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    problem = make_head_problem(BASE)
    _, tied, _ = problem.leaves(None)
    full = problem.weight.double().requires_grad_()
    statistics(problem, (tied[:13] * 2.0, tied, None)).logprobs.sum().backward()
    padded = torch.arange(64) < 61
    logp = ((2.0 * full[:13] @ full.T) / problem.case.temperature).masked_fill(~padded, -math.inf).log_softmax(1)
    logp.gather(1, problem.targets.labels[:, None]).sum().backward()
    assert tied.grad is not None and full.grad is not None
    assert_close(tied.grad, full.grad, 2e-6, "tied")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_the_sum_of_all_micro_batches(dtype: torch.dtype) -> None:
    problems = [make_head_problem(BASE.but(dtype=dtype, seed=seed, tokens=40)) for seed in (1, 2, 3)]
    _, weight, _ = problems[0].leaves(None)
    weight.main_grad = torch.full(weight.shape, 0.5)  # type: ignore[attr-defined]
    want = torch.full(weight.shape, 0.5, dtype=torch.float64)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    for problem in problems:
        problem = replace(problem, weight=problems[0].weight)
        full = full_leaves(problem)
        scalar(problem, full_statistics(problem, full)).backward()
        hidden = problem.hidden.clone().requires_grad_()
        result = statistics(problem, (hidden, weight, None), accumulate_main_grad=True, chunk_tokens=7)
        scalar(problem, result).backward()
        assert full[1].grad is not None and hidden.grad is not None
        want[:61] += full[1].grad
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert len(seen) == 3 and all((gradient == 0).all() for gradient in seen)
    error = float((weight.main_grad - want).norm() / want.norm())  # type: ignore[attr-defined]
    assert error <= (1e-6 if dtype == torch.float32 else 2.5e-3)


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, _ = problem.leaves(None)
    statistics(problem, (hidden, weight.detach(), None)).logprobs.sum().backward()
    assert hidden.grad is not None
    statistics(problem, (hidden.detach(), weight, None)).logprobs.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not statistics(problem, (hidden, weight, None)).logprobs.requires_grad


def test_bad_input_is_refused_by_name() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, _ = problem.leaves(None)
    labels, ids = problem.targets.labels, problem.ids

    def call(**changes: Any) -> HeadStatistics:
        arguments = {"hidden": hidden, "weight": weight, "labels": labels, "group": None, "vocab_size": 61, **changes}
        return vocab_parallel_head_stats(**arguments)

    twice = ids.clone()
    twice[2, 1] = twice[2, 3]
    beyond = ids.clone()
    beyond[4, 2] = 61
    mask, many, wrong_label = torch.ones(13, dtype=torch.bool), torch.zeros(13, 62).long(), labels.clone()
    wrong_label[3] = 61
    for match, changes in (
        (r"hidden \[T, H\] and weight \[V_local, H\], got \(13, 23\)", {"hidden": hidden[:, :23]}),
        ("weight is torch.float64", {"weight": weight.double()}),
        ("bfloat16 or float16, got torch.int64", {"hidden": hidden.long(), "weight": weight.long()}),
        (r"bias \[V_local\] = \(64,\), got \(61,\)", {"bias": torch.zeros(61)}),
        ("vocab_size = 65 does not fit 1 shards of 64", {"vocab_size": 65}),
        ("temperature must be above 0, got 0.0", {"temperature": 0.0}),
        (r"labels \[T\] = \(13,\), got torch.int32", {"labels": labels.int()}),
        (r"label 61 in row 3 is outside the vocabulary \[0, 61\)", {"labels": wrong_label}),
        ("both ids and ids_valid, or neither", {"ids": ids}),
        (r"id 61 in row 4, slot 2 is outside", {"ids": beyond, "ids_valid": beyond >= 0}),
        ("stands twice in row 2", {"ids": twice, "ids_valid": twice >= 0}),
        ("K = 62 ids are more than the vocabulary of 61", {"ids": many, "ids_valid": many > 0}),
        ("bool ids_valid", {"ids": ids, "ids_valid": ids}),
        (r"int64 ids \[T, K\] with T = 13", {"ids": ids.int(), "ids_valid": ids >= 0}),
        ("topk must be from 0 to vocab_size = 61, got 62", {"topk": 62}),
        ("chunk_tokens must be at least 1, got 0", {"chunk_tokens": 0}),
        ("needs weight.main_grad", {"accumulate_main_grad": True}),
        (r"plan.rows must be \[R\] int64", {"plan": RowPlan(mask, 1)}),
        ("num_gradient <= rows <= T, got 14, 13, 13", {"plan": RowPlan(torch.arange(13), 14)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call(**changes)
    weight.main_grad = torch.zeros(64, 24, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"float32 weight.main_grad.*got torch.bfloat16"):
        call(accumulate_main_grad=True)
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        RowPlan.of(mask.int(), None)
    with pytest.raises(ValueError, match="advantages must be"):
        RowPlan.of(mask, torch.zeros(12))


def test_chunks_are_about_equal_and_within_the_budget() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert default_chunk_tokens(32768, 151_936, cuda) == 4096
    assert default_chunk_tokens(32768, 151_936, cuda, in_flight=2) * 151_936 * 4 * 2 <= 2_500_000_000
    assert default_chunk_tokens(32768, 19_000, cuda) == 32768, "a shard gets more rows, in the same memory"
    assert default_chunk_tokens(4201, 151_936, cuda) == 2101
    assert default_chunk_tokens(0, 151_936, cpu) == 1
    assert default_chunk_tokens(10_000, 151_936, cpu) * 151_936 * 4 <= 96_000_000
    assert default_chunk_tokens(10_000, 151_936, cpu, in_flight=4) == 64
    assert default_chunk_tokens(10_000, 53, cpu) == 10_000, "a narrow vocabulary is limited by bytes alone"
    for rows, chunk, width in ((0, 1, 9), (10, 3, 9), (512, 171, 32768), (5000, 64, 151_936), (5000, 300, 10**7)):
        together = gradient_rows(rows, chunk, width)
        assert together % chunk == 0 and together >= chunk
        assert together * width * 2 <= 192_000_000 + chunk * width * 2 or together < 128 + chunk
