"""Both modes of the fused head on 1, 2 and 4 shards against one unsharded float64 softmax; collectives and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.head import loss as fused_head_loss
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.head.vocab_topk import HeadStatistics
from megatron_dppo.losses import policy_loss, predictive_sums, topk_sums
from megatron_dppo.types import LossNeeds, LossOutput, SamplingMask, SlotSums
from tests.distributed.collectives import recorded_collectives
from tests.distributed.head_cases import (
    LOGPROB_BOUND,
    SHARDS,
    TOKEN_LOSSES,
    HeadCase,
    HeadProblem,
    Leaves,
    assert_close,
    check_gradients,
    cut,
    full_leaves,
    full_loss_inputs,
    full_statistics,
    make_head_problem,
    needs_of,
)
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

WORLD = SHARDS
ALL = LossNeeds(entropy_gradient=True, other_square=True, slot_gradient=True)
BASE = HeadCase(tokens=23)
BF16 = BASE.but(dtype=torch.bfloat16, tokens=80)
CASES = [
    BASE,
    BASE.but(dtype=torch.float64, bias=True),
    BF16,
    BF16.but(
        tokens=200, vocab_size=700, shard=300, hidden=32, bias=True, temperature=1.0, k=20
    ),  # the last shard is padding
    BASE.but(vocab_size=33),  # one entry in the third shard, none in the last
    BASE.but(vocab_size=5, shard=6),  # three shards of padding
    BASE.but(holes=True, dtype=torch.float64),
    BASE.but(holes=True, vocab_size=20),
    BASE.but(first=-math.inf),  # nothing of the first shard is possible
    BASE.but(first=-math.inf, vocab_size=33, dtype=torch.float64),
    BASE.but(first=-60.0, dtype=torch.bfloat16, tokens=80),  # it never has the largest logit
    BASE.but(k=61),
    BASE.but(k=2, vocab_size=2, shard=1),
    BASE.but(offset=-512.0, dtype=torch.float64),
    BASE.but(scale=12.0, dtype=torch.float64),
    BASE.but(tokens=1),
    BASE.but(filtered=True),
    BASE.but(filtered=True, dtype=torch.float64, holes=True, vocab_size=33),
    BF16.but(filtered=True, tokens=200),
]


def statistics(problem: HeadProblem, leaves: Leaves, group: dist.ProcessGroup | None, **options: Any) -> HeadStatistics:
    hidden, weight, bias = leaves
    return vocab_parallel_head_stats(
        hidden,
        weight,
        options.pop("labels", problem.targets.labels),
        group=group,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        bias=bias,
        **{
            "ids": problem.ids,
            "ids_valid": problem.ids >= 0,
            "sampling_mask": problem.targets.sampling_mask,
            "needs": ALL,
            **options,
        },
    )


def loss_of(
    problem: HeadProblem, leaves: Leaves, name: str, group: dist.ProcessGroup | None, **options: Any
) -> LossOutput:
    hidden, weight, bias = leaves
    return dppo_head_loss(
        hidden,
        weight,
        options.pop("targets", problem.targets),
        partial(policy_loss, config=TOKEN_LOSSES[name]),
        group=group,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        bias=bias,
        needs=replace(needs_of(TOKEN_LOSSES[name]), topk_sums=options.pop("topk_sums", None)),
        **options,
    )


def payload(problem: HeadProblem, rows: int, more: int = 0) -> int:
    """4 (4 + K) bytes a row, twice that in float64."""
    return (8 if problem.case.dtype == torch.float64 else 4) * rows * (4 + problem.case.k + more)


def check_mode_a(problem: HeadProblem, group: dist.ProcessGroup | None, chunk: int | None) -> None:
    case, size = problem.case, 1 if group is None else group.size()
    where, k = f"{case} on {size} ranks", min(4, problem.case.vocab_size)
    leaves, full = problem.leaves(group), full_leaves(problem)
    want, upstream = full_statistics(problem, full), problem.upstream
    with recorded_collectives() as calls:
        got = statistics(
            problem,
            leaves,
            group,
            chunk_tokens=chunk,
            topk=k,
        )
        scale = upstream.to(got.logprobs.dtype)
        (scale[0] @ got.logprobs + scale[1] @ got.entropy + at_ids(scale, got)).backward()
    sent = 2 * min(k, len(leaves[1])) + 1
    assert calls == ([("all_gather_into_tensor", payload(problem, case.tokens, sent))] if size > 1 else []), where
    for name in ("logprobs", "entropy", "id_logprobs", "other_logprob", "other_square"):
        assert_close(getattr(got, name), getattr(want, name).detach(), 2 * LOGPROB_BOUND[case.dtype], f"{where} {name}")
    (upstream[0] @ want.logprobs + upstream[1] @ want.entropy + at_ids(upstream, want)).backward()
    if case.vocab_size > 1:
        # The derivatives at the ids put more into few entries, whose roundings to bf16 do not average out.
        check_gradients(problem, leaves, full, group, where, 1.5 if case.dtype == torch.bfloat16 else 1.0)
    check_topk(problem, got, k, where)
    check_equal_on_all_ranks([x for x in got if x is not None], group, where)


def at_ids(scale: Tensor, result: HeadStatistics) -> Tensor:
    """A scalar with another derivative by the log-probability of each id."""
    assert result.id_logprobs is not None
    factors = (1 + torch.arange(result.id_logprobs.shape[1], device=scale.device)) / result.id_logprobs.shape[1]
    finite = torch.where(result.id_logprobs.isfinite(), result.id_logprobs, 0.0)
    return scale.flip(0)[0] @ (finite * factors).sum(1)


def check_topk(problem: HeadProblem, got: HeadStatistics, k: int, where: str) -> None:
    hidden, weight, bias = (None if x is None else x.detach() for x in full_leaves(problem))
    assert hidden is not None and weight is not None and got.topk_ids is not None and got.topk_logprobs is not None
    logits = cut(hidden @ weight.T if bias is None else hidden @ weight.T + bias, problem.targets.sampling_mask)
    logp = (logits / problem.case.temperature).log_softmax(1).masked_fill(logits < -1e4, -math.inf)
    order = logp.sort(dim=1, descending=True, stable=True)
    # Two logits closer than fp32 sees may change places; none in these cases are, but in bf16 sums differ.
    assert_close(got.topk_logprobs, order.values[:, :k], 2 * LOGPROB_BOUND[problem.case.dtype], f"{where} topk")
    assert_close(logp.gather(1, got.topk_ids), order.values[:, :k], 1e-5, f"{where} topk ids")


def check_mode_b(
    problem: HeadProblem, group: dist.ProcessGroup | None, name: str, chunk: int, slot_sums: SlotSums | None = None
) -> None:
    case, size = problem.case, 1 if group is None else group.size()
    where = f"{name} {case} on {size} ranks{' by sums' if slot_sums else ''}"
    leaves, full = problem.leaves(group), full_leaves(problem)
    want = policy_loss(full_loss_inputs(problem, full), TOKEN_LOSSES[name])
    with recorded_collectives() as calls:
        got = loss_of(problem, leaves, name, group, chunk_tokens=chunk, topk_sums=slot_sums)
        got.loss_sum.backward()
    rows = [min(chunk, case.tokens - start) for start in range(0, case.tokens, chunk)]
    square = int(needs_of(TOKEN_LOSSES[name]).other_square)
    expected = [("all_gather_into_tensor", payload(problem, n, square)) for n in rows]
    if slot_sums is not None:
        number, columns = 8 if case.dtype == torch.float64 else 4, 2 if slot_sums is topk_sums else 6
        expected = [("all_gather_into_tensor", 4 * number * n) for n in rows]
        expected += [("all_reduce SUM", (columns + 1 + square) * number * n) for n in rows]
    assert sorted(calls) == sorted(expected if size > 1 else []), where
    want.loss_sum.backward()
    assert_close(got.loss_sum.detach(), want.loss_sum.detach().double(), 1e-4, where)
    assert (got.keep_mask == want.keep_mask).all() and int(got.num_tokens) == int(want.num_tokens), where
    for key, metric in want.metrics.items():
        assert math.isclose(float(got.metrics[key].numerator), float(metric.numerator), rel_tol=1e-4, abs_tol=1e-4), key
    if case.tokens > 1:
        # Ratios put most of the gradient into a few tokens, whose roundings to bf16 do not average out.
        check_gradients(problem, leaves, full, group, where, 2.5 if case.dtype == torch.bfloat16 else 1.0)
    check_equal_on_all_ranks([got.loss_sum.detach(), got.keep_mask], group, where)


def check_plan(problem: HeadProblem, group: dist.ProcessGroup | None) -> None:
    """Rows without loss send nothing, and the result is that without a plan."""
    targets, size = problem.targets, 1 if group is None else group.size()
    plan = RowPlan.of(targets.loss_mask, targets.advantages)
    assert 0 < plan.num_gradient < len(plan.rows) < len(targets.labels)
    broken = torch.where(targets.loss_mask, targets.labels, 10**9)
    plain, planned = problem.leaves(group), problem.leaves(group)
    want = loss_of(problem, plain, "dppo_topk_tv", group)
    with recorded_collectives() as calls:
        options = {"plan": plan, "targets": replace(targets, labels=broken)}
        got = loss_of(problem, planned, "dppo_topk_tv", group, chunk_tokens=len(plan.rows), **options)
        statistics(problem, planned, group, plan=plan, labels=broken)
        empty = RowPlan.of(torch.zeros_like(targets.loss_mask), None)
        assert float(loss_of(problem, planned, "dppo_topk_tv", group, plan=empty).loss_sum) == 0
        statistics(problem, planned, group, plan=empty)
    sizes = [("all_gather_into_tensor", payload(problem, len(plan.rows), more)) for more in (0, 1)]
    assert calls == (sizes if size > 1 else [])
    torch.testing.assert_close(got.loss_sum, want.loss_sum)
    got.loss_sum.backward()
    want.loss_sum.backward()
    for a, b in zip(planned[:2], plain[:2], strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def check_main_grad(group: dist.ProcessGroup | None) -> None:
    """Two micro-batches in each mode, added to what stands in the buffer."""
    problems = [make_head_problem(BF16.but(seed=seed)) for seed in (1, 2)]
    _, weight, _ = problems[0].leaves(group)
    full_weight = problems[0].weight.double()[:61].requires_grad_()
    for mode_b in (False, True):
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
        full_weight.grad = None
        for problem in problems:
            hidden = problem.hidden.clone().requires_grad_()
            reference = full_loss_inputs(problem, (problem.hidden.double(), full_weight, None))
            policy_loss(reference, TOKEN_LOSSES["pg_is"]).loss_sum.backward()
            options = {"accumulate_main_grad": True, "chunk_tokens": 30}
            if mode_b:
                loss_of(problem, (hidden, weight, None), "pg_is", group, **options).loss_sum.backward()
                continue
            result = statistics(problem, (hidden, weight, None), group, **options)
            inputs = replace(reference, logprobs=result.logprobs, entropy=result.entropy)
            policy_loss(inputs, TOKEN_LOSSES["pg_is"]).loss_sum.backward()
        assert full_weight.grad is not None
        padded = torch.nn.functional.pad(full_weight.grad, (0, 0, 0, 3))
        rank, height = (0 if group is None else group.rank()), len(weight)
        want = padded[rank * height : (rank + 1) * height]
        error = (weight.main_grad - 1 - want).norm() / full_weight.grad.norm()  # type: ignore[attr-defined]
        assert error <= 2.5e-3, (mode_b, error)


def check_nan(group: dist.ProcessGroup | None) -> None:
    """A NaN in the shard of one rank shows on all ranks, in its row alone."""
    problem = make_head_problem(BASE.but(bias=True))
    hidden, weight, bias = problem.leaves(group)
    with torch.no_grad():
        hidden[5] = math.nan
    got = statistics(problem, (hidden, weight, bias), group)
    for values in got[:4]:
        assert values is not None
        assert (values.isnan().view(23, -1).any(1) == (torch.arange(23) == 5)).all()
    assert bias is not None
    nothing = statistics(problem, (hidden, weight, torch.full_like(bias, -math.inf)), group)
    assert nothing.logprobs.isnan().all() and nothing.entropy.isnan().all()


def check_bad_input(group: dist.ProcessGroup | None) -> None:
    """The same error on every rank, before any collective."""
    problem = make_head_problem(BASE)
    leaves, targets = problem.leaves(group), problem.targets
    labels, ids = targets.labels.clone(), targets.rollout_topk_ids
    assert ids is not None
    labels[2], wrong = 61, ids.clone()
    wrong[0, 1] = 61
    wrong_dtype = (leaves[0], leaves[1].double(), None)
    wrong_ids = replace(targets, rollout_topk_ids=wrong)
    sampling_mask = SamplingMask(
        torch.full((23,), (int(targets.labels[0]) + 1) % 61).int(), torch.ones(23, dtype=torch.int32)
    )
    wrong_sets = replace(targets, sampling_mask=sampling_mask)
    whole = replace(targets, sequence_ids=torch.zeros(23, dtype=torch.int64))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("label 61 in row 2", lambda: statistics(problem, leaves, group, labels=labels)),
        ("id 61 in row 0, slot 1", lambda: loss_of(problem, leaves, "grpo", group, targets=wrong_ids)),
        (
            "of the 0-th row with loss is outside its sampling mask",
            lambda: statistics(problem, leaves, group, sampling_mask=sampling_mask),
        ),
        ("is outside its sampling mask", lambda: loss_of(problem, leaves, "grpo", group, targets=wrong_sets)),
        ("weight is torch.float64", lambda: statistics(problem, wrong_dtype, group)),
        ("does not fit", lambda: statistics(replace(problem, case=BASE.but(vocab_size=65)), leaves, group)),
        ("topk must be from 0", lambda: statistics(problem, leaves, group, topk=62)),
        ("whole sequences", lambda: loss_of(problem, leaves, "grpo", group, targets=whole)),
    ]
    with recorded_collectives() as collectives:
        for match, call in calls:
            with pytest.raises(ValueError, match=match):
                call()
    assert not collectives


def check_equal_on_all_ranks(values: list[Tensor], group: dist.ProcessGroup | None, where: str) -> None:
    if group is None:
        return
    for value in values:
        parts = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(parts, value.contiguous(), group=group)
        assert all(torch.equal(part.nan_to_num(7.0), value.nan_to_num(7.0)) for part in parts), where


def check_two_chunks_in_flight(group: dist.ProcessGroup | None) -> None:
    """As on CUDA."""
    with patch.object(fused_head_loss, "chunks_in_flight", return_value=2):
        check_mode_b(make_head_problem(BASE), group, "dppo_topk_tv", 4)
        check_mode_b(make_head_problem(BF16), group, "dppo_topk_kl", 9, topk_sums)
        check_mode_b(make_head_problem(BASE.but(filtered=True)), group, "entropy bonus", 4)


def all_checks(group: dist.ProcessGroup | None) -> Iterator[Callable[[], None]]:
    """Yield every check of every case, ready to run in a group."""
    for number, case in enumerate(CASES):
        yield partial(check_mode_a, make_head_problem(case), group, (None, 5, 7)[number % 3])
        if case.k == 5 and case.vocab_size > 5:
            chunk = (9, 1, 50)[number % 3]
            yield partial(check_mode_b, make_head_problem(case), group, "dppo_topk_tv", chunk)
            yield partial(check_mode_b, make_head_problem(case), group, "dppo_topk_kl", chunk, topk_sums)
            yield partial(check_mode_b, make_head_problem(case), group, "dppo_topk_tv", chunk, topk_sums)
    for number, name in enumerate(TOKEN_LOSSES):
        case = (BASE, BF16)[number % 2].but(seed=number)
        yield partial(check_mode_b, make_head_problem(case), group, name, 9)
        if "predictive" in name and "centered" not in name:
            yield partial(check_mode_b, make_head_problem(case), group, name, 9, predictive_sums)
    for case in (BASE.but(holes=True, dtype=torch.float64), BASE.but(vocab_size=33)):
        yield partial(check_mode_b, make_head_problem(case), group, "score centering", 9)
        yield partial(check_mode_b, make_head_problem(case), group, "dppo_binary_tv centered", 9)
        yield partial(check_mode_b, make_head_problem(case), group, "dppo_topk_tv predictive", 9)
    yield partial(check_two_chunks_in_flight, group)
    for case in (BASE, BASE.but(filtered=True)):
        yield partial(check_plan, make_head_problem(case), group)
    for check in (check_main_grad, check_nan, check_bad_input):
        yield partial(check, group)


def check_everything(rank: int, world_size: int) -> None:
    """Run all checks on one, two and four shards; groups of the same size share them."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: pairs[rank // 2], WORLD: dist.new_group(list(range(WORLD)))}
    for size, group in groups.items():
        for check in islice(all_checks(group), rank // size, None, WORLD // size):
            check()


@pytest.mark.distributed
def test_both_modes_equal_the_unsharded_softmax_on_1_2_and_4_shards() -> None:
    run_distributed(check_everything, WORLD)
