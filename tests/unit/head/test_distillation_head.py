"""The divergence from a teacher in the fused head against an unsharded float64 softmax, in one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.teacher import COLUMN, Side, TeacherTargets, gradient_, merge_totals, shard_kls, shard_totals
from megatron_dppo.losses import no_policy_loss, policy_loss
from megatron_dppo.types import Divergence, LossInputs, LossNeeds, LossOutput, TokenTargets

TOKENS, VOCABULARY, TEMPERATURE = 37, 101, 0.7
KINDS = [
    Divergence("reverse_kl", coef=0.8),
    Divergence("forward_kl", coef=1.3),
]
LOSS = LossConfig(
    name="dppo_binary_tv", divergence_threshold_low=0.05, divergence_threshold_high=0.05, entropy_coef=0.1
)


class Problem:
    """A student of width 24 and a teacher of width 40 over a padded vocabulary."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, closeness: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight = draw(TOKENS, 24).to(dtype), (0.4 * draw(VOCABULARY + 3, 24)).to(dtype)
        self.teacher_hidden, self.teacher_weight = (
            draw(TOKENS, 40).to(dtype),
            (0.3 * draw(VOCABULARY + 3, 40)).to(dtype),
        )
        if closeness:
            wide = torch.zeros(VOCABULARY + 3, 16, dtype=dtype)
            self.teacher_hidden = torch.cat([self.hidden, self.teacher_hidden[:, :16]], 1)
            self.teacher_weight = torch.cat([self.weight * (1 - closeness), wide], 1)
        labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        mask = torch.rand(TOKENS, generator=generator) > 0.3
        mu = self.log_p(self.hidden.double(), self.weight.double()).gather(1, labels[:, None])[:, 0]
        mu = mu + 0.3 * draw(TOKENS)
        mu[5] = math.nan
        mask[5] = True
        self.targets = TokenTargets(
            labels=labels,
            loss_mask=mask,
            advantages=draw(TOKENS).float(),
            rollout_logprobs=mu.float(),
            token_weights=torch.rand(TOKENS, generator=generator) + 0.5,
        )

    def log_p(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight[:VOCABULARY].T / TEMPERATURE).log_softmax(-1)

    def run(self, divergence: Divergence, **options: Any) -> tuple[LossOutput, Tensor, Tensor]:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        options = {"plan": RowPlan.of(self.targets.loss_mask, None), "chunk_tokens": 7} | options
        output = dppo_head_loss(
            hidden,
            weight,
            options.pop("targets", self.targets),
            options.pop("loss", no_policy_loss),
            group=None,
            vocab_size=VOCABULARY,
            temperature=TEMPERATURE,
            teacher=TeacherTargets(self.teacher_hidden, self.teacher_weight, divergence),
            **options,
        )
        output.loss_sum.backward()
        assert hidden.grad is not None and weight.grad is not None
        return output, hidden.grad, weight.grad

    def expected(self, divergence: Divergence, loss: LossConfig | None = None) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        log_p = self.log_p(hidden, weight)
        log_q = self.log_p(self.teacher_hidden.double(), self.teacher_weight.double())
        mask = self.targets.loss_mask & self.targets.rollout_logprobs.isfinite()  # type: ignore[union-attr]
        terms = plain(divergence, log_p, log_q)[mask] * self.targets.token_weights[mask]  # type: ignore[index]
        total = divergence.coef * terms.sum()
        if loss is not None:
            own = LossInputs(
                logprobs=log_p.gather(1, self.targets.labels[:, None])[:, 0],
                entropy=-(log_p.exp() * log_p).sum(-1),
                advantages=self.targets.advantages,
                loss_mask=self.targets.loss_mask,
                rollout_logprobs=self.targets.rollout_logprobs,
                token_weights=self.targets.token_weights,
            )
            total = total + policy_loss(own, loss).loss_sum
        total.backward()
        assert hidden.grad is not None and weight.grad is not None
        return total.detach(), hidden.grad, weight.grad


def plain(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergences as they are written down, for autograd."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    return {
        "reverse_kl": lambda: kl(log_p, log_q),
        "forward_kl": lambda: kl(log_q, log_p),
    }[divergence.name]()


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: d.name)
@pytest.mark.parametrize("policy", [False, True], ids=["alone", "with DPPO"])
def test_loss_and_gradients_are_those_of_float64(divergence: Divergence, policy: bool) -> None:
    problem = Problem()
    options: dict[str, Any] = {}
    if policy:
        options = {"loss": partial(policy_loss, config=LOSS), "needs": LossNeeds(entropy_gradient=True)}
    output, of_hidden, of_weight = problem.run(divergence, **options)
    total, expected_hidden, expected_weight = problem.expected(divergence, LOSS if policy else None)
    assert error(output.loss_sum.detach(), total) < 2e-6
    assert error(of_hidden, expected_hidden) < 2e-6 and error(of_weight, expected_weight) < 2e-6
    assert not of_weight[VOCABULARY:].any(), "padding is no word"
    assert not of_hidden[~problem.targets.loss_mask].any() and not of_hidden[5].any()
    if policy:
        torch.testing.assert_close(output.metrics["loss"].numerator, output.loss_sum.detach())


def test_every_chunk_size_and_dtype_gives_the_same() -> None:
    for divergence in KINDS:
        total, of_hidden, of_weight = Problem().expected(divergence)
        for size in (1, 64, None):
            result = Problem().run(divergence, chunk_tokens=size)
            assert max(error(result[1], of_hidden), error(result[2], of_weight)) < 2e-6
        exact = Problem(torch.float64)
        _, *wide = exact.run(divergence)
        _, *want = exact.expected(divergence)
        assert max(error(a, b) for a, b in zip(wide, want, strict=True)) < 1e-12
        half = Problem(torch.bfloat16)
        _, *rounded = half.run(divergence)
        _, *want = half.expected(divergence)
        assert max(error(a, b) for a, b in zip(rounded, want, strict=True)) < 5e-3
        assert float(total) > 0


def test_a_student_close_to_its_teacher_has_a_precise_gradient() -> None:
    """The KL is 1e-5 here: what is left of numbers that nearly cancel."""
    problem = Problem(closeness=1e-3)
    for divergence in KINDS:
        output, of_hidden, _ = problem.run(divergence)
        _, expected, _ = problem.expected(divergence)
        assert error(of_hidden, expected) < 2e-3
        mean = output.metrics["teacher_reverse_kl"]
        assert 0 <= float(mean.numerator / mean.denominator) < 1e-3


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: d.name)
def test_shards_add_up_including_one_of_padding_only(divergence: Divergence) -> None:
    """Three shards of 40 entries for 80 words less one; words of probability 0 and logits far from 0 among them."""
    generator = torch.Generator().manual_seed(6)
    widths, words = (40, 39, 0), 79
    z, u = (5 * torch.randn(11, words, generator=generator, dtype=torch.float64) for _ in range(2))
    z[0] += 1e4
    u[1] -= 1e4
    z[2, 3:7], u[3, ::3] = -1e3, -1e3  # probabilities of 0
    leaf = z.clone().requires_grad_()
    log_p, log_q = (leaf / TEMPERATURE).log_softmax(-1), (u / TEMPERATURE).log_softmax(-1)
    expected = plain(divergence, log_p, log_q)
    weights = torch.rand(11, generator=generator, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), leaf)

    def shards(values: Tensor) -> list[Tensor]:
        parts = values.split([40, 39], 1)
        return [torch.nn.functional.pad(p, (0, 40 - p.shape[1]), value=torch.nan) for p in (*parts, values[:, :0])]

    sides = []
    for whole in (z, u):
        parts = torch.stack([shard_totals(p, own, TEMPERATURE) for p, own in zip(shards(whole), widths, strict=True)])
        maximum, log_total = merge_totals(parts, TEMPERATURE)
        sides.append([Side(p, maximum, log_total) for p in shards(whole)])
    every = list(zip(*sides, widths, strict=True))
    kls = torch.stack([shard_kls(p, q, own, TEMPERATURE) for p, q, own in every]).sum(0)
    torch.testing.assert_close(kls[:, COLUMN[divergence.name]], expected.detach(), rtol=1e-10, atol=1e-10)
    result = [gradient_(p, q.logits, own, kls, weights, TEMPERATURE, divergence.name) for p, q, own in every]
    together = torch.cat([part[:, :own] for part, own in zip(result, widths, strict=True)], 1)
    torch.testing.assert_close(together, wanted, rtol=1e-9, atol=1e-10)
    assert not any(part[:, own:].any() for part, own in zip(result, widths, strict=True)), "padding has none"


def test_the_gradient_includes_the_loss_scale_and_is_skipped_if_not_needed() -> None:
    problem, scale = Problem(), torch.tensor(1024.0)
    hidden = problem.hidden.clone().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    output = dppo_head_loss(
        hidden,
        weight,
        problem.targets,
        no_policy_loss,
        group=None,
        vocab_size=VOCABULARY,
        temperature=TEMPERATURE,
        teacher=TeacherTargets(problem.teacher_hidden, problem.teacher_weight, KINDS[0]),
        plan=RowPlan.of(problem.targets.loss_mask, None),
        accumulate_main_grad=True,
        grad_scale=scale,
    )
    (output.loss_sum * scale).backward()
    _, of_hidden, of_weight = problem.expected(KINDS[0])
    assert hidden.grad is not None
    assert error(hidden.grad / scale, of_hidden) < 2e-6
    assert error(weight.main_grad / scale, of_weight) < 2e-6  # type: ignore[attr-defined]
    with torch.no_grad():
        second = dppo_head_loss(
            problem.hidden,
            problem.weight,
            problem.targets,
            no_policy_loss,
            group=None,
            vocab_size=VOCABULARY,
            temperature=TEMPERATURE,
            teacher=TeacherTargets(problem.teacher_hidden, problem.teacher_weight, KINDS[0]),
            plan=RowPlan.of(problem.targets.loss_mask, None),
        )
    torch.testing.assert_close(second.loss_sum, output.loss_sum.detach())


def test_a_worked_example() -> None:
    """Two words; the student says 1/2 and 1/2, the teacher 3/4 and 1/4."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.zeros(2, 1)
    teacher_weight = torch.tensor([[0.75], [0.25]]).log()
    targets = TokenTargets(labels=torch.tensor([0]), loss_mask=torch.tensor([True]), advantages=torch.zeros(1))
    result = {}
    for name in COLUMN:
        student = weight.clone().requires_grad_()
        teacher = TeacherTargets(torch.ones(1, 1), teacher_weight, Divergence(name))
        output = dppo_head_loss(hidden, student, targets, no_policy_loss, group=None, vocab_size=2, teacher=teacher)
        output.loss_sum.backward()
        assert student.grad is not None
        result[name] = float(output.loss_sum.detach()), student.grad[:, 0].tolist()
    reverse, forward = math.log(4 / 3) / 2, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    # p (log p/q - KL): log(2/3) and log(2), minus their mean, over 2; p - q = -1/4, 1/4
    slope = (math.log(2) - math.log(2 / 3)) / 4
    assert result["reverse_kl"] == (pytest.approx(reverse), pytest.approx([-slope, slope]))
    assert result["forward_kl"] == (pytest.approx(forward), pytest.approx([-0.25, 0.25]))


def test_incompatible_inputs_are_refused() -> None:
    problem = Problem()
    narrow = TeacherTargets(problem.teacher_hidden, problem.teacher_weight[:-1], KINDS[0])
    options: dict[str, Any] = {"group": None, "vocab_size": VOCABULARY}
    with pytest.raises(ValueError, match="37 rows and 103 entries"):
        dppo_head_loss(problem.hidden, problem.weight, problem.targets, no_policy_loss, teacher=narrow, **options)
    teacher = TeacherTargets(problem.teacher_hidden, problem.teacher_weight, KINDS[0])
    advantages = torch.where(torch.arange(TOKENS) % 2 == 0, 0.0, problem.targets.advantages)
    plan = RowPlan.of(problem.targets.loss_mask, advantages)
    with pytest.raises(ValueError, match="without advantages"):
        dppo_head_loss(
            problem.hidden, problem.weight, problem.targets, no_policy_loss, teacher=teacher, plan=plan, **options
        )
