"""Mode B of the fused head against an unsharded float64 softmax and against mode A, in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.stats import loss_inputs, vocab_parallel_head_stats
from megatron_dppo.losses import policy_loss, supervised_loss
from megatron_dppo.types import LossInputs, LossNeeds, LossOutput, Metric
from tests.distributed.head_cases import (
    GRAD_BOUND,
    TOKEN_LOSSES,
    HeadCase,
    HeadProblem,
    Leaves,
    check_gradients,
    full_leaves,
    full_loss_inputs,
    make_head_problem,
    needs_of,
)

BASE = HeadCase(tokens=40)
BF16 = BASE.but(dtype=torch.bfloat16, tokens=80)


def run(problem: HeadProblem, leaves: Leaves, config: LossConfig | None, **options: Any) -> LossOutput:
    hidden, weight, bias = leaves
    targets = options.pop("targets", problem.targets)
    loss = supervised_loss if config is None else partial(policy_loss, config=config)
    return dppo_head_loss(
        hidden,
        weight,
        targets,
        options.pop("loss", loss),
        group=None,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        bias=bias,
        needs=LossNeeds() if config is None else replace(needs_of(config), topk_sums=None),
        **options,
    )


def mode_a(problem: HeadProblem, leaves: Leaves, config: LossConfig, **options: Any) -> LossOutput:
    hidden, weight, bias = leaves
    result = vocab_parallel_head_stats(
        hidden,
        weight,
        problem.targets.labels,
        group=None,
        vocab_size=problem.case.vocab_size,
        temperature=problem.case.temperature,
        bias=bias,
        ids=problem.ids,
        ids_valid=problem.ids >= 0,
        needs=replace(needs_of(config), topk_sums=None),
        **options,
    )
    return policy_loss(loss_inputs(problem.targets, result, problem.case.vocab_size), config)


def check_output(got: LossOutput, want: LossOutput, bound: float) -> None:
    torch.testing.assert_close(got.loss_sum.double(), want.loss_sum.detach().double(), rtol=bound, atol=bound)
    assert int(got.num_tokens) == int(want.num_tokens)
    assert (got.keep_mask == want.keep_mask).all()
    assert got.metrics.keys() == want.metrics.keys()
    for name, metric in want.metrics.items():
        mine = got.metrics[name]
        assert mine.kind == metric.kind
        for a, b in ((mine.numerator, metric.numerator), (mine.denominator, metric.denominator)):
            assert math.isclose(float(a), float(b), rel_tol=bound, abs_tol=bound), name


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("case", [BASE, BASE.but(bias=True, dtype=torch.float64), BF16], ids=["fp32", "fp64", "bf16"])
def test_every_token_loss_equals_float64_and_mode_a(name: str, case: HeadCase) -> None:
    config, problem = TOKEN_LOSSES[name], make_head_problem(case)
    want_leaves, other = full_leaves(problem), problem.leaves(None)
    want = policy_loss(full_loss_inputs(problem, want_leaves), config)
    want.loss_sum.backward()
    mode_a(problem, other, config).loss_sum.backward()
    # The terms of the slots put more into few entries, whose roundings to bf16 do not average out.
    factor = 1.5 if "center" in name else 1.0
    check_gradients(problem, other, want_leaves, None, f"{name} A", factor)
    for chunk in (None, 7):
        leaves = problem.leaves(None)
        got = run(problem, leaves, config, chunk_tokens=chunk)
        check_output(got, want, 1e-4)
        got.loss_sum.backward()
        check_gradients(problem, leaves, want_leaves, None, f"{name} B {chunk}", factor)


@pytest.mark.parametrize("case", [BASE.but(k=61), BASE.but(holes=True), BASE.but(tokens=1)], ids=str)
def test_corner_cases_equal_float64(case: HeadCase) -> None:
    config, problem = replaced(TOKEN_LOSSES["dppo_topk_kl"], topk=case.k), make_head_problem(case)
    leaves, full = problem.leaves(None), full_leaves(problem)
    got, want = run(problem, leaves, config, chunk_tokens=9), policy_loss(full_loss_inputs(problem, full), config)
    check_output(got, want, 1e-4)
    if case.tokens > 1:
        got.loss_sum.backward()
        want.loss_sum.backward()
        check_gradients(problem, leaves, full, None, str(case))


def replaced(config: LossConfig, **changes: Any) -> LossConfig:
    return LossConfig(**{**config.model_dump(exclude_unset=True), **changes})


def test_a_loss_without_rollout_data_works() -> None:
    problem = make_head_problem(BASE)
    plain = replace(problem.targets, rollout_topk_ids=None, rollout_topk_logprobs=None, rollout_logprobs=None)
    leaves, full = problem.leaves(None), full_leaves(problem)
    got, want = run(problem, leaves, None, targets=plain), supervised_loss(full_loss_inputs(problem, full))
    check_output(got, want, 1e-5)
    got.loss_sum.backward()
    want.loss_sum.backward()
    check_gradients(problem, leaves, full, None, "supervised")


@pytest.mark.parametrize("chunk", [1, 6, 100])
def test_the_row_plan_changes_no_result(chunk: int) -> None:
    problem, config = make_head_problem(BASE), TOKEN_LOSSES["dppo_topk_tv"]
    mask = problem.targets.loss_mask
    broken = torch.where(mask, problem.targets.labels, -100)
    plan = RowPlan.of(mask, problem.targets.advantages)
    assert 0 < plan.num_gradient < len(plan.rows) < 40
    plain, leaves = problem.leaves(None), problem.leaves(None)
    want = run(problem, plain, config)
    got = run(problem, leaves, config, plan=plan, chunk_tokens=chunk, targets=replace(problem.targets, labels=broken))
    # A mask outside the plan may say anything: rows outside the loss mask are kept by some rules, dropped by others.
    assert (got.keep_mask == (want.keep_mask & mask)).all()
    check_output(replace(got, keep_mask=want.keep_mask), want, 1e-5)
    got.loss_sum.backward()
    want.loss_sum.backward()
    for mine, other in zip(leaves[:2], plain[:2], strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_plan_without_rows_gives_a_zero_loss_that_can_be_differentiated() -> None:
    problem = make_head_problem(BASE)
    leaves = problem.leaves(None)
    got = run(problem, leaves, TOKEN_LOSSES["dppo_topk_tv"], plan=RowPlan.of(torch.zeros(40, dtype=torch.bool), None))
    got.loss_sum.backward()
    assert float(got.loss_sum) == 0 and int(got.num_tokens) == 0 and not got.keep_mask.any()
    assert got.keep_mask.shape == (40,) and "divergence_max" in got.metrics
    for leaf in leaves[:2]:
        assert leaf.grad is not None and (leaf.grad == 0).all()


def test_a_plan_that_leaves_out_a_gradient_is_refused() -> None:
    problem = make_head_problem(BASE)
    plan = RowPlan.of(problem.targets.loss_mask, problem.targets.advantages)
    for name in ("entropy bonus", "KL penalty k3"):
        with pytest.raises(ValueError, match="a gradient in a row"):
            run(problem, problem.leaves(None), TOKEN_LOSSES[name], plan=plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_loss_scales_all_gradients(dtype: torch.dtype) -> None:
    problem, config = make_head_problem(BASE.but(dtype=dtype, bias=True)), TOKEN_LOSSES["dppo_binary_tv"]
    once, scaled = problem.leaves(None), problem.leaves(None)
    run(problem, once, config).loss_sum.backward()
    (run(problem, scaled, config).loss_sum * 0.25).backward()
    for a, b in zip(once, scaled, strict=True):
        assert a is not None and b is not None and a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad * 0.25, b.grad)


def test_a_second_backward_is_refused() -> None:
    problem = make_head_problem(BASE)
    got = run(problem, problem.leaves(None), TOKEN_LOSSES["grpo"])
    got.loss_sum.backward(retain_graph=True)
    with pytest.raises(ValueError, match="can be differentiated"):
        got.loss_sum.backward()


def test_metrics_of_any_kind_add_up_over_the_chunks() -> None:
    problem = make_head_problem(BASE)

    def loss(inputs: LossInputs) -> LossOutput:
        metrics = {"a": Metric(2.0, 3.0), "b": Metric(inputs.advantages.max(), kind="max")}
        output = supervised_loss(inputs)
        return replace(output, metrics=metrics)

    got = run(problem, problem.leaves(None), None, loss=loss, chunk_tokens=10)
    assert (got.metrics["a"].numerator, got.metrics["a"].denominator) == (8.0, 12.0)
    assert float(got.metrics["b"].numerator) == float(problem.targets.advantages.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_the_sum_of_all_micro_batches(dtype: torch.dtype) -> None:
    problems = [make_head_problem(BASE.but(dtype=dtype, seed=seed)) for seed in (1, 2, 3)]
    config = TOKEN_LOSSES["pg_is"]
    weight = problems[0].weight.clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, 0.5)  # type: ignore[attr-defined]
    want = torch.full(weight.shape, 0.5, dtype=torch.float64)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    for problem in problems:
        problem = replace(problem, weight=problems[0].weight)
        full = full_leaves(problem)
        policy_loss(full_loss_inputs(problem, full), config).loss_sum.backward()
        hidden = problem.hidden.clone().requires_grad_()
        got = run(problem, (hidden, weight, None), config, accumulate_main_grad=True, chunk_tokens=11)
        before = weight.main_grad.clone()  # type: ignore[attr-defined]
        got.loss_sum.backward()
        assert full[1].grad is not None and hidden.grad is not None
        assert (before == weight.main_grad).all()  # type: ignore[attr-defined]
        want[:61] += full[1].grad
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert len(seen) == 3 and all((gradient == 0).all() for gradient in seen)
    error = float((weight.main_grad - want).norm() / want.norm())  # type: ignore[attr-defined]
    # bf16: its unit of rounding.
    assert error <= (1e-6 if dtype == torch.float32 else 2.0**-8)


def test_with_main_grad_the_gradient_of_the_loss_must_be_one() -> None:
    problem = make_head_problem(BASE)
    hidden, weight, _ = problem.leaves(None)
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    got = run(problem, (hidden, weight, None), TOKEN_LOSSES["grpo"], accumulate_main_grad=True)
    with pytest.raises(ValueError, match=r"grad_scale \(1"):
        (got.loss_sum * 0.5).backward()


@pytest.mark.parametrize("in_main_grad", [False, True])
def test_small_gradients_in_fp16_need_their_scale_from_the_start(in_main_grad: bool) -> None:
    """Advantages of 1e-8 give gradients of the logits below the smallest number of fp16."""
    problem, config = make_head_problem(BASE.but(dtype=torch.float16, tokens=80)), TOKEN_LOSSES["pg_is"]
    problem = replace(problem, targets=replace(problem.targets, advantages=problem.targets.advantages * 1e-8))
    full = full_leaves(problem)
    policy_loss(full_loss_inputs(problem, full), config).loss_sum.backward()
    errors = []
    for scale in (1.0, 2.0**24):
        hidden, weight, _ = problem.leaves(None)
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        options = {"accumulate_main_grad": in_main_grad, "grad_scale": torch.tensor(scale)}
        (run(problem, (hidden, weight, None), config, **options).loss_sum * scale).backward()
        result = weight.main_grad if in_main_grad else weight.grad  # type: ignore[attr-defined]
        for got, want in ((hidden.grad, full[0].grad), (result, full[1].grad)):
            assert got is not None and want is not None
            errors.append(float((got[: len(want)].double() / scale - want).norm() / want.norm()))
    assert min(errors[:2]) > 0.01 and max(errors[2:]) < GRAD_BOUND[torch.float16], errors


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    problem, config = make_head_problem(BASE), TOKEN_LOSSES["grpo"]
    tied, full = problem.weight.clone().requires_grad_(), problem.weight.double().requires_grad_()
    with_main, main = problem.weight.clone().requires_grad_(), torch.zeros(problem.weight.shape)
    with_main.main_grad = main  # type: ignore[attr-defined]
    run(problem, (tied[:40] * 2.0, tied, None), config).loss_sum.backward()
    run(problem, (with_main[:40] * 2.0, with_main, None), config, accumulate_main_grad=True).loss_sum.backward()
    policy_loss(full_loss_inputs(problem, (2.0 * full[:40], full[:61], None)), config).loss_sum.backward()
    assert tied.grad is not None and full.grad is not None and with_main.grad is not None
    torch.testing.assert_close(tied.grad.double(), full.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((with_main.grad + main).double(), full.grad, rtol=1e-5, atol=1e-5)


def test_without_a_gradient_only_the_loss_is_computed() -> None:
    problem, config = make_head_problem(BASE), TOKEN_LOSSES["dppo_topk_tv"]
    leaves = problem.leaves(None)
    with torch.no_grad():
        got = run(problem, leaves, config, chunk_tokens=9)
    assert not got.loss_sum.requires_grad
    hidden, weight, bias = leaves
    torch.testing.assert_close(got.loss_sum, run(problem, (hidden, weight.detach(), bias), config).loss_sum.detach())


def test_a_nan_row_affects_the_result_only_inside_the_plan() -> None:
    problem, config = make_head_problem(BASE), TOKEN_LOSSES["grpo"]
    problem.hidden[3] = math.nan
    for inside in (False, True):
        mask = problem.targets.loss_mask.clone()
        mask[3] = inside
        leaves, targets = problem.leaves(None), replace(problem.targets, loss_mask=mask)
        got = run(problem, leaves, config, targets=targets, plan=RowPlan.of(mask, None), chunk_tokens=9)
        got.loss_sum.backward()
        assert leaves[0].grad is not None
        assert math.isnan(float(got.metrics["entropy"].numerator)) == inside
        assert bool(leaves[0].grad.isfinite().all()) != inside


def test_bad_input_is_refused_by_name() -> None:
    problem, config = make_head_problem(BASE), TOKEN_LOSSES["dppo_topk_tv"]
    leaves, targets = problem.leaves(None), problem.targets
    assert targets.rollout_topk_ids is not None
    ids = targets.rollout_topk_ids.clone()
    ids[2, :2] = torch.tensor([61, 0])
    sequences = torch.zeros(40, dtype=torch.int64)
    for match, options in (
        ("loss of whole sequences .gspo", {"targets": replace(targets, sequence_ids=sequences)}),
        ("id 61 in row 2, slot 0", {"targets": replace(targets, rollout_topk_ids=ids)}),
        ("label -1 in row 0", {"targets": replace(targets, labels=sequences - 1)}),
        (r"labels \[T\] = \(40,\)", {"targets": replace(targets, labels=sequences[1:])}),
        ("chunk_tokens must be at least 1", {"chunk_tokens": -3}),
        ("needs weight.main_grad", {"accumulate_main_grad": True}),
    ):
        with pytest.raises(ValueError, match=match):
            run(problem, leaves, config, **options)
    inside = (targets.rollout_topk_ids[:, :-1] == targets.labels[:, None]).any(1)
    for is_among in (True, False):
        row = int((targets.loss_mask & (inside == is_among)).nonzero()[0])
        wrong = int(targets.labels[row]) if is_among else -1
        expected = "-1 .unused" if is_among else f"the label, {int(targets.labels[row])}"
        for slot in (wrong, 60):
            ids = targets.rollout_topk_ids.clone()
            ids[row, -1] = slot
            with pytest.raises(ValueError, match=f"{slot} in .*row {row}, .*expected {expected}"):
                run(problem, leaves, config, targets=replace(targets, rollout_topk_ids=ids))
            free = replace(targets, rollout_topk_ids=ids, loss_mask=targets.loss_mask & (torch.arange(40) != row))
            run(problem, leaves, config, targets=free)  # not of the loss
    with pytest.raises(ValueError, match="'gspo' needs sequence_ids"):
        run(problem, leaves, LossConfig(name="gspo"))
