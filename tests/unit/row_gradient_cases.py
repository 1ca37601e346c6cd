"""The Triton gradient of a row against autograd in float64: cases for interpret_row_kernels.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.row_kernel_cases import BF16, BLOCK, FP32, INF, NAN, close, normal

ROUNDING = {FP32: 1e-5, BF16: 2**-7}
"""relative: exp(-30) in fp32, whose exponent is rounded; 8 bits of mantissa, which the interpreter cuts off where the
device rounds"""
WEIGHT = 3e-6
"""Bound for a weight of about 1: the rounding of a difference that nothing is left of."""


class Row(NamedTuple):
    """The arguments of ``row_gradient`` after the logits, less ``out``."""

    own: int
    labels: Tensor
    maximum: Tensor
    total: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None
    entropy: Tensor | None
    temperature: float


def gradient(logits: Tensor, row: Row, out: Tensor) -> Tensor:
    from megatron_dppo.head.row_kernels_triton import row_gradient

    returned = row_gradient(logits, *row, out)
    assert returned is out
    return out


def problem(logits: Tensor, own: int, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Row, Tensor]:
    """The kernel's arguments, made in float64 and rounded, and the gradient that autograd finds in float64."""
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(2, len(logits), generator=g)
    leaf = logits.double().requires_grad_()
    z = leaf[:, :own] / temperature
    logp = z.log_softmax(1)
    p_log_p = torch.where(logp > -INF, logp.exp() * logp.clamp(min=-1e300), 0.0)
    entropy = -p_log_p.sum(1)
    value = weights[0].double() * logp.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(labels >= 0, 0.0)
    # A label of another shard: its log-probability is minus the log of the total, up to a constant here.
    value = value - torch.where(labels < 0, weights[0].double() * z.logsumexp(1), 0.0)
    if with_entropy:
        value = value + weights[1].double() * entropy
    (expected,) = torch.autograd.grad(value.sum(), leaf)
    maximum = logits[:, :own].float().amax(1)
    total = ((logits[:, :own].double() - maximum[:, None].double()) / temperature).exp().sum(1).float()
    given = (weights[1], entropy.detach().float()) if with_entropy else (None, None)
    return Row(own, labels, maximum, total, weights[0], *given, temperature), expected


def agrees(result: Tensor, expected: Tensor, row: Row) -> None:
    """To the rounding of the result's dtype, but where two terms cancel: at the label, and with entropy everywhere."""
    cancels = torch.arange(result.shape[1]) == row.labels[:, None]
    if row.entropy is not None:
        cancels[:] = True
    close(result.where(~cancels, 0.0), expected.where(~cancels, 0.0), ROUNDING[result.dtype], 1e-37)
    close(result, expected, ROUNDING[result.dtype], WEIGHT)


def gradient_matches_float64_for_every_width_dtype_and_place() -> None:
    for width, own in ((1, 1), (9, 5), (BLOCK, BLOCK), (BLOCK + 1, BLOCK - 1), (3 * BLOCK + 64, 2 * BLOCK + 37)):
        labels = torch.tensor([0, own - 1, -1, own // 2])
        for dtype, out_dtype in ((FP32, FP32), (FP32, BF16), (BF16, BF16)):
            for with_entropy in (False, True):
                logits = normal(4, width, dtype)
                row, expected = problem(logits, own, labels, 0.7, with_entropy)
                out = gradient(logits, row, torch.full_like(logits, NAN, dtype=out_dtype))
                agrees(out, expected, row)
                assert (out[:, own:] == 0).all()
                assert torch.equal(logits, normal(4, width, dtype))


def gradient_matches_float64_for_the_largest_vocabulary() -> None:
    logits = normal(1, 151936, FP32)
    row, expected = problem(logits, 151936, torch.tensor([151000]), 1.0, True)
    agrees(gradient(logits, row, torch.empty_like(logits)), expected, row)


def writing_over_the_logits_gives_the_same_bits() -> None:
    # Widths with a part of a block, with padding in the same block and in later ones, and more than two blocks.
    for width, own in ((2 * BLOCK, 2 * BLOCK), (5 * BLOCK + 64, 5 * BLOCK + 37), (4 * BLOCK, BLOCK + 6), (30, 17)):
        labels = torch.tensor([own - 1, 3, -1])
        for dtype in (FP32, BF16):
            logits = normal(3, width, dtype)
            row, _ = problem(logits, own, labels, 1.1, True)
            apart = [gradient(logits, row, torch.empty_like(logits, dtype=d)) for d in (dtype, BF16)]
            for out_dtype, expected in zip((dtype, BF16), apart, strict=True):
                shared = logits.clone()
                out = shared.view(out_dtype)[:, :width]
                assert torch.equal(gradient(shared, row, out), expected)
                assert out.data_ptr() == shared.data_ptr()


def gradient_of_extreme_rows_matches_float64() -> None:
    own = BLOCK + 70
    logits = normal(6, own, FP32)
    logits[0] -= 1e4
    logits[1, ::2] = -INF
    logits[2, 40] = 200.0
    logits[3, : own - 1] = -INF
    logits[4] = -3e38
    logits[4, 7] = 3e38
    logits[5] = torch.linspace(-600, 600, own)
    labels = torch.tensor([5, 9, 40, own - 1, 7, 0])
    for dtype in (FP32, BF16):
        for with_entropy in (False, True):
            row, expected = problem(logits.to(dtype), own, labels, 1.0, with_entropy)
            result = gradient(logits.to(dtype), row, torch.empty(6, own, dtype=dtype))
            assert result.isfinite().all()
            # Where z is -3e38 float64 has p log p = 0 (-6e38), which is 0, but autograd has NaN there.
            agrees(result, expected.nan_to_num(0.0), row)


def padding_gets_zero_whatever_stands_there() -> None:
    for own in (0, 10, BLOCK, BLOCK + 1):
        logits, numbers = normal(3, 2 * BLOCK + 6, FP32), torch.tensor([1.0, 2.0, 3.0])
        row = Row(own, torch.full((3,), -1), numbers, 9 * numbers, numbers, None, None, 1.0)
        plain = gradient(logits, row, torch.full_like(logits, NAN))
        assert (plain[:, own:] == 0).all() and (plain[:, :own] != 0).all()
        for r, value in enumerate((NAN, INF, 1e30)):
            logits[r, own:] = value
        assert torch.equal(gradient(logits, row._replace(entropy=numbers), torch.full_like(logits, NAN)), plain)
        # A row without a distribution has no gradient, but padding has.
        undefined = gradient(logits, row._replace(total=0 * numbers, maximum=NAN * numbers), torch.empty_like(logits))
        assert undefined[:, :own].isnan().all() and (undefined[:, own:] == 0).all()


def bad_arguments_of_the_gradient_are_named() -> None:
    logits, numbers = normal(4, 8, FP32), torch.ones(4)
    row = Row(8, torch.zeros(4, dtype=torch.int64), numbers, numbers, numbers, None, None, 1.0)
    low = logits.view(BF16)
    for changed, out, message in (
        (row, logits.double(), "float64"),
        (row, logits[:, :4], r"out \[4, 8\]"),
        (row, logits.T.contiguous().T, "contiguous rows"),
        (row, low[:, 8:], "16 bytes apart"),
        (row, low.view(-1)[:32].view(4, 8), "16 bytes a row against 32"),
        (row._replace(grad_entropy=numbers), logits, "needs entropy"),
        (row._replace(maximum=numbers[:3]), logits, r"got torch.float32 \[3\]"),
        (row._replace(total=numbers.double()), logits, "float64"),
        (row._replace(own=9), logits, "shard_size = 9"),
    ):
        with pytest.raises(ValueError, match=message):
            gradient(logits, changed, out)
    # Next to each other in one storage is apart.
    both = torch.zeros(8, 8)
    gradient(both[:4], row, both[4:])
    gradient(logits[:0], Row(8, row.labels[:0], *(numbers[:0],) * 3, None, None, 1.0), logits[:0])
