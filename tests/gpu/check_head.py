"""The fused head on the device against float64 on the CPU: its two passes over the rows, which are Triton kernels on
CUDA and plain torch in the rehearsal, and both modes of the whole head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_dppo.head import row_kernels
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.types import LossInputs, LossNeeds, LossOutput, TokenTargets
from tests.gpu.checks import Result

ROWS, OWN, TEMPERATURE = 40, 32003, 0.7
WIDTHS = {"even rows": 32064, "uneven rows": 32005}
"""Triton has a kernel of its own for sizes that are divisible by 16."""
COUNTS = (0, 20, 64, 128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FULL_WIDTH, FULL_ROWS = 151936, 4096
TOKENS, HIDDEN, VOCABULARY, PADDED, K = 200, 256, 5003, 5056, 20


def check(device: torch.device) -> Iterator[Result]:
    """Which kernels run, each against float64, in place at full size, and the head around them."""
    wanted = device.type == "cuda"
    result = row_kernels.triton_kernels(torch.zeros(1, 1, device=device)) is not None
    yield Result(f"the row passes are {'Triton' if wanted else 'torch'} (0 = yes)", float(result != wanted), 0.0)
    for layout, width in WIDTHS.items():
        for name, dtype in DTYPES.items():
            logits = difficult_logits(width).to(device, dtype)
            yield from check_statistics(f"{name} {layout}", logits)
            yield from check_gradient(f"{name} {layout}", logits)
    yield from check_in_place(device)
    for name, dtype in DTYPES.items():
        yield from check_whole_head(name, device, dtype)


def difficult_logits(width: int) -> Tensor:
    """Rows with a spread that a trained model has; the first ones are extreme, and NaN stands in the padding."""
    logits = 4 * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    logits[0] -= 1e4
    logits[1, ::2] = -torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.linspace(-300, 300, width)
    logits[4] = torch.linspace(300, -300, width)
    logits[5, OWN - 1] = 45.0
    logits[6, 4096] = torch.nan
    logits[:, OWN:] = torch.nan
    return logits


def places(count: int) -> tuple[Tensor, Tensor | None]:
    """Labels and distinct ids in any order; some are -1, and every other row has its label among the ids."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, OWN, (ROWS,), generator=generator)
    labels[1], labels[5], labels[7] = 2 * (OWN // 4) + 1, OWN - 1, -1
    if not count:
        return labels, None
    ids = torch.stack([torch.randperm(OWN - 1, generator=generator)[:count] for _ in range(ROWS)])
    ids[::2, 1] = labels[::2].where(~(ids[::2] == labels[::2, None]).any(1), -1)
    ids[::3, ::5] = -1
    return labels, ids


def reference_statistics(logits: Tensor, labels: Tensor, ids: Tensor | None) -> Tensor:
    """Float64 on the CPU; the set's entries are struck out before the sum of the others."""
    x = logits[:, :OWN].double().cpu()
    chosen = labels[:, None] if ids is None else torch.cat([labels[:, None], ids], 1)
    maximum = x.amax(1)
    z = (x - maximum.where(maximum != -torch.inf, 0.0)[:, None]) / TEMPERATURE
    exp = z.exp()
    struck = torch.nn.functional.pad(exp, (0, 1)).scatter(1, chosen.where(chosen >= 0, OWN), 0.0)[:, :OWN]
    moment = (exp * z.clamp(min=-1e300)).sum(1)
    other = torch.where(maximum.isnan(), torch.nan, struck.sum(1))
    at = z.gather(1, chosen.clamp(min=0)).where(chosen >= 0, -torch.inf)
    return torch.cat([torch.stack([maximum, moment, other], 1), at], 1)


def check_statistics(name: str, logits: Tensor) -> Iterator[Result]:
    """All columns, the worst over the numbers of ids."""
    # z is up to 860 here, where fp32 numbers are 6e-5 apart.
    bounds = {"maximum": 0.0, "moment": 3e-5, "mass outside the ids": 3e-5, "z at the ids": 1e-6}
    worst = dict.fromkeys(bounds, 0.0)
    for count in COUNTS:
        labels, ids = places(count)
        on_device = None if ids is None else ids.to(logits.device)
        actual = row_kernels.row_statistics(logits, OWN, labels.to(logits.device), on_device, TEMPERATURE)
        expected = reference_statistics(logits, labels, ids)
        errors = [_relative(actual[:, i], expected[:, i]) for i in range(3)]
        errors.append(_largest(actual[:, 3:], expected[:, 3:], scaled=True))
        worst = {what: max(worst[what], error) for what, error in zip(worst, errors, strict=True)}
    for what, bound in bounds.items():
        yield Result(f"{name} {what}, relative", worst[what], bound)


def check_gradient(name: str, logits: Tensor) -> Iterator[Result]:
    """The rows that have a distribution, with and without a gradient of the entropy, to fp32 and to bf16."""
    labels, _ = places(0)
    rows = torch.tensor([r for r in range(ROWS) if r not in (2, 6)])
    labels, logits = labels[rows], logits[rows.to(logits.device)]
    generator = torch.Generator().manual_seed(1)
    g, e = torch.randn(2, len(rows), generator=generator)
    x = logits[:, :OWN].double().cpu()
    logp = (x / TEMPERATURE).log_softmax(1)
    p, finite = logp.exp(), logp.clamp(min=-1e300)
    entropy = -(p * finite).sum(1)
    maximum = x.amax(1)
    total = ((x - maximum[:, None]) / TEMPERATURE).exp().sum(1)
    hot = torch.zeros(len(rows), OWN + 1, dtype=torch.float64)
    hot.scatter_(1, labels.where(labels >= 0, OWN)[:, None], g.double()[:, None])
    device = logits.device
    padding = 0.0
    given = [t.float().to(device) for t in (maximum, total, g)]
    for kind, weight in (("", None), (" with entropy", e)):
        factor = g[:, None] if weight is None else g[:, None] + weight[:, None] * (finite + entropy[:, None])
        expected = torch.nn.functional.pad((hot[:, :OWN] - p * factor) / TEMPERATURE, (0, logits.shape[1] - OWN))
        extra = (None, None) if weight is None else (weight.to(device), entropy.float().to(device))
        for out_name, dtype, bound in (
            ("fp32", torch.float32, 1e-5),
            ("bf16", torch.bfloat16, 3e-3),
            ("fp16", torch.float16, 1e-3),
        ):
            if dtype not in (logits.dtype, torch.bfloat16, torch.float16):
                continue
            out = torch.full_like(logits, torch.nan, dtype=dtype)
            row_kernels.row_gradient(logits, OWN, labels.to(device), *given, *extra, TEMPERATURE, out)
            error = (out.double().cpu() - expected).norm() / expected.norm()
            yield Result(f"{name} gradient to {out_name}{kind}, relative", float(error), bound)
            padding += float((out[:, OWN:] != 0).sum())
    yield Result(f"{name} gradient, padding that is not 0", padding, 0.0)


def check_in_place(device: torch.device) -> Iterator[Result]:
    """Over the logits the same bits as beside them, run after run: no thread writes what another has yet to read."""
    rows = FULL_ROWS if device.type == "cuda" else 4
    generator = torch.Generator(device).manual_seed(0)
    logits = 4 * torch.randn(rows, FULL_WIDTH, generator=generator, device=device)
    labels = torch.randint(0, FULL_WIDTH, (rows,), generator=generator, device=device)
    statistics = row_kernels.row_statistics(logits, FULL_WIDTH, labels, None, 1.0)
    second = row_kernels.row_statistics(logits, FULL_WIDTH, labels, None, 1.0)
    yield Result("statistics at full size, numbers that differ between runs", _differing(statistics, second), 0.0)
    total = statistics[:, 2] + statistics[:, 3].exp()
    entropy = total.log() - statistics[:, 1] / total
    ones = torch.ones_like(total)

    def gradient(values: Tensor, out: Tensor) -> Tensor:
        arguments = (labels, statistics[:, 0], total, ones, ones, entropy, 1.0)
        return row_kernels.row_gradient(values, FULL_WIDTH, *arguments, out)

    for name, dtype in (("bf16 over fp32", torch.bfloat16), ("fp32 over fp32", torch.float32)):
        beside = gradient(logits, torch.empty_like(logits, dtype=dtype))
        differing = 0.0
        for _ in range(5):
            shared = logits.clone()
            differing += _differing(gradient(shared, shared.view(dtype)[:, :FULL_WIDTH]), beside)
        yield Result(f"{name} at full size, numbers that differ from those beside it in 5 runs", differing, 0.0)


def check_whole_head(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[Result]:
    """Mode A and mode B in several chunks: values and the gradients of hidden states and weight."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (0.1 * torch.randn(PADDED, HIDDEN, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:K] for _ in range(TOKENS)])
    slopes = torch.randn(2, TOKENS, generator=generator)

    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    logp = ((leaves[0] @ leaves[1].T)[:, :VOCABULARY] / TEMPERATURE).log_softmax(1)
    logprobs, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    wanted = torch.autograd.grad((slopes[0] * logprobs + slopes[1] * entropy).sum(), leaves)
    other = logp.scatter(1, ids, -torch.inf).scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    bound, gradient_bound = 1e-5, {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}.get(dtype, 1e-5)

    sizes = {"group": None, "vocab_size": VOCABULARY, "temperature": TEMPERATURE, "chunk_tokens": 64}
    moved = [t.to(device) for t in (labels, ids, slopes)]
    found_leaves = [t.to(device).requires_grad_() for t in (hidden, weight)]
    valid = torch.ones_like(moved[1], dtype=torch.bool)
    actual = vocab_parallel_head_stats(
        *found_leaves, moved[0], ids=moved[1], ids_valid=valid, needs=LossNeeds(entropy_gradient=True), topk=K, **sizes
    )
    assert actual.id_logprobs is not None and actual.other_logprob is not None and actual.topk_logprobs is not None
    pairs = {
        "log-probabilities": (actual.logprobs, logprobs),
        "entropy": (actual.entropy, entropy),
        "log-probabilities at ids": (actual.id_logprobs, logp.gather(1, ids)),
        "mass outside the ids": (actual.other_logprob, other),
        "own Top-K": (actual.topk_logprobs, logp.topk(K).values),
    }
    for what, (value, expected) in pairs.items():
        yield Result(f"{name} mode A {what}, largest difference", _largest(value.detach(), expected.detach()), bound)
    grads = torch.autograd.grad((moved[2][0] * actual.logprobs + moved[2][1] * actual.entropy).sum(), found_leaves)
    yield from _gradients(f"{name} mode A", grads, wanted, gradient_bound)

    def loss(inputs: LossInputs) -> LossOutput:
        assert inputs.entropy is not None and inputs.rollout_logprobs is not None
        value = (inputs.advantages * inputs.logprobs + inputs.rollout_logprobs * inputs.entropy).sum()
        mask = inputs.loss_mask
        return LossOutput(loss_sum=value, num_tokens=mask.sum(), keep_mask=mask, metrics={})

    mask = torch.ones(TOKENS, dtype=torch.bool, device=device)
    targets = TokenTargets(labels=moved[0], loss_mask=mask, advantages=moved[2][0], rollout_logprobs=moved[2][1])
    leaves_b = [t.detach().clone().requires_grad_() for t in found_leaves]
    output = dppo_head_loss(*leaves_b, targets, loss, needs=LossNeeds(entropy_gradient=True), **sizes)
    yield from _gradients(f"{name} mode B", torch.autograd.grad(output.loss_sum, leaves_b), wanted, gradient_bound)

    with_main = [t.detach().clone().requires_grad_() for t in found_leaves]
    with_main[1].main_grad = torch.ones(PADDED, HIDDEN, device=device)  # type: ignore[attr-defined]
    output = dppo_head_loss(
        *with_main, targets, loss, needs=LossNeeds(entropy_gradient=True), accumulate_main_grad=True, **sizes
    )
    output.loss_sum.backward()
    main_grad = with_main[1].main_grad - 1  # type: ignore[attr-defined]
    # 1 was added to the gradient and taken away again: 6e-8 for each entry.
    yield from _gradients(f"{name} mode B main_grad", (with_main[0].grad, main_grad), wanted, gradient_bound)


def _gradients(name: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> Iterator[Result]:
    for what, mine, expected in zip(("hidden states", "weight"), found, wanted, strict=True):
        error = (mine.double().cpu() - expected).norm() / expected.norm()
        yield Result(f"{name} gradient of {what}, relative", float(error), bound)


def _differing(a: Tensor, b: Tensor) -> float:
    return float((a != b).sum())


def _largest(found: Tensor, expected: Tensor, scaled: bool = False) -> float:
    """The largest difference; infinite unless the same places are infinite or NaN. ``scaled``: by 1 + |expected|."""
    found = found.double().cpu()
    finite = expected.isfinite()
    same = torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.where(found.isinf(), 0.0), expected.where(expected.isinf(), 0.0)
    )
    if not same:
        return float("inf")
    difference = (found - expected).abs() / (1 + expected.abs() if scaled else 1)
    return float(difference.where(finite, 0.0).max())


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest |found - expected| / |expected|; exact where ``expected`` is 0. A GPU rounds tiny numbers to 0."""
    found = found.double().cpu()
    found, expected = (x.masked_fill(x.abs() <= 1e-30, 0.0) for x in (found, expected))
    usual = expected.isfinite() & (expected != 0)
    rest = _largest(found.where(~usual, 0.0), expected.where(~usual, 0.0))
    return max(rest, float(((found - expected) / expected).abs().where(usual, 0.0).max()))
