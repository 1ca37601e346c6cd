"""The two passes over the rows of a chunk of logits: the statistics of a shard, and the gradient of the logits.

The plain torch version works everywhere and is the oracle of the Triton one, which takes over on CUDA where Triton is
installed. On the CPU it goes through a few rows at a time, so that every pass but the first reads from the cache.
"""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from megatron_dppo.head.mixed_gemm import accumulation_dtype

_P = ParamSpec("_P")
_UNDERFLOW = -1e4
"""Finite stand-in for log 0. Its exp is 0 in every dtype, so that 0 log 0 gives 0 without a branch."""
BLOCK_BYTES = 1 << 20
"""Size of a block of rows in the dtype of the statistics. There are two at a time: small enough for the cache of
a core, and large enough that the number of calls does not count."""


def _or_triton(function: Callable[Concatenate[Tensor, _P], Tensor]) -> Callable[Concatenate[Tensor, _P], Tensor]:
    """Return a function that calls Triton's kernel of that name where there is one, else ``function``."""
    name = function.__name__.removesuffix("_torch")

    @functools.wraps(function)
    def choose(logits: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        triton = triton_kernels(logits)
        chosen: Callable[..., Tensor] = function if triton is None else getattr(triton, name)
        return chosen(logits, *args, **kwargs)

    return choose


def row_statistics_torch(
    logits: Tensor,
    shard_size: int,
    labels: Tensor,
    ids: Tensor | None,
    temperature: float,
    squares: bool = False,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Return the statistics of each row on one shard, ``[n, 4 + K]``, in one read of ``logits [n, W]``.

    With ``z = (logit - m) / temperature``, over the first ``shard_size`` entries of the row (the others are padding):

    - column 0, m: the largest logit, before the temperature
    - column 1, t: sum of exp(z) z
    - column 2, o: sum of exp(z) over the entries that are neither the label nor one of the ids
    - column 3, y: z of the label, -inf if it is not of this shard
    - columns 4 to 3 + K: z of each id, -inf in the same way
    - with ``squares`` one more, q: sum of exp(2 z) over the entries of o

    A shard without entries, and a row of -inf, has m = y = -inf and t = o = 0. A NaN among the logits gives NaN.
    ``labels [n]`` and ``ids [n, K]`` are int64 indices in this shard, -1 = not of this shard or an unused slot. The
    result is float32, or float64 for float64 logits.

    With ``overwrite``, for logits in the dtype of the statistics, exp((logit - m) / temperature) takes the place of the
    first ``shard_size`` logits, for ``gradient_of_exponentials``. Triton's kernel does not have it.

    Long because each step reads and overwrites the same memory, so that the order is the algorithm.
    """
    dtype = accumulation_dtype(logits)
    chosen = labels[:, None] if ids is None else torch.cat([labels[:, None], ids], 1)
    slots = chosen.shape[1]
    out = torch.zeros(len(logits), 3 + slots + squares, dtype=dtype, device=logits.device)
    # Views of ``out``: m, t, o, then y of label and ids, then q if asked for.
    maximum, weighted, other = out[:, :3].unbind(1)
    values = out[:, 3 : 3 + slots]
    square = out[:, 3 + slots :]
    if shard_size == 0 or len(logits) == 0:
        maximum.fill_(-torch.inf)
        values.fill_(-torch.inf)
        return out
    of_shard = chosen >= 0
    # In place of -1 another index of the row, or 0 where there is none: that entry comes back after the sum.
    struck = torch.where(of_shard, chosen, chosen.amax(1, keepdim=True).clamp(min=0))
    values.copy_(logits.gather(1, struck))
    scale, difference = _bits_per_logit(temperature), _scratch(logits, shard_size, dtype)
    exponential = None if overwrite else torch.empty_like(difference)
    columns = (maximum, weighted, other, struck, square)
    for block, *(highest, moment, total, places, of_squares) in _row_blocks(
        shard_size, logits[:, :shard_size], *columns
    ):
        z, exp = difference[: len(block)], block if exponential is None else exponential[: len(block)]
        highest.copy_(block.amax(1))
        torch.sub(block, _finite(highest)[:, None], out=z).mul_(scale)
        torch.exp2(z, out=exp)
        # A -inf has to give 0 times something finite.
        torch.sum(z.clamp_(min=_UNDERFLOW).mul_(exp), 1, out=moment)
        # o is a sum without label and ids, never a difference: it keeps its digits where the ids hold almost all of
        # the mass.
        torch.sum(exp.scatter_(1, places, 0.0), 1, out=total)
        if squares:
            of_squares.copy_(torch.mul(exp, exp, out=z).sum(1, keepdim=True))
    # The loop counts z in units of ln 2.
    weighted *= math.log(2)
    below = values - _finite(maximum)[:, None]
    exponentials = torch.exp2(below * scale)
    # A row without any id of this shard has struck out entry 0, which belongs to o.
    unstruck = torch.where(of_shard.any(1), 0.0, exponentials[:, 0])
    other += unstruck
    if squares:
        square += unstruck.square()[:, None]
    if overwrite:
        logits.scatter_(1, struck, exponentials)
    values.copy_(torch.where(of_shard, below / temperature, -torch.inf))
    return out


def row_gradient_torch(
    logits: Tensor,
    shard_size: int,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Return the gradient of ``logits [n, W]`` from that of log p(label) and, if given, of the entropy, in ``out``.

    ``([j = label] g - p_j (g + e (log p_j + H))) / temperature`` with ``p_j log p_j = 0`` where p_j = 0, and 0 in the
    padding.

    ``labels`` are as in ``row_statistics``. Of the whole row over all shards, ``[n]`` each: ``maximum`` the largest
    logit before the temperature, ``total`` the sum of exp((logit - maximum) / temperature), ``grad_logprobs`` g,
    ``grad_entropy`` e, ``entropy`` H, which is needed with e.

    ``out [n, W]`` may lie in the memory of ``logits`` if its row i begins where row i of the logits begins, and its
    elements are not larger: ``logits`` itself, or a bf16 or fp16 view of it.
    """
    if shard_size == 0 or len(logits) == 0:
        return out.zero_()
    # -p (g + e (log p + H)) / temperature = exp(z) (base + slope z)
    base, slope = -grad_logprobs / (total * temperature), None
    if grad_entropy is not None and entropy is not None:
        slope = -grad_entropy / (total * temperature)
        base = base + slope * (entropy - total.log())
    index = labels.clamp(min=0)
    at_label = (logits.gather(1, index[:, None]).squeeze(1).to(maximum.dtype) - maximum) / temperature
    factor = base if slope is None else base + slope * at_label.clamp(min=_UNDERFLOW)
    at_label = at_label.exp() * factor + grad_logprobs / temperature
    scale, scratch = _bits_per_logit(temperature), _scratch(logits, shard_size, maximum.dtype)
    exponential = None if slope is None else torch.empty_like(scratch)
    columns = (maximum, base) if slope is None else (maximum, base, math.log(2) * slope)
    for block, target, highest, *factors in _row_blocks(
        shard_size, logits[:, :shard_size], out[:, :shard_size], *columns
    ):
        z = scratch[: len(block)]
        torch.sub(block, _finite(highest)[:, None], out=z).mul_(scale)
        if exponential is None:
            z.exp2_().mul_(factors[0][:, None])
        else:
            exp = torch.exp2(z, out=exponential[: len(block)])
            z.clamp_(min=_UNDERFLOW).mul_(factors[1][:, None]).add_(factors[0][:, None]).mul_(exp)
        target.copy_(z)
    return _finished(out, shard_size, labels, at_label)


row_statistics = _or_triton(row_statistics_torch)
row_gradient = _or_triton(row_gradient_torch)


def gradient_of_exponentials(
    exponentials: Tensor,
    shard_size: int,
    labels: Tensor,
    shard_maximum: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad_logprobs: Tensor,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """``row_gradient`` without an entropy term from what ``row_statistics_torch`` left behind, which it overwrites.

    ``shard_maximum [n]`` is the largest logit of this shard, before the temperature. ``out`` is ``exponentials``
    itself, or memory of its own.
    """
    if shard_size == 0 or len(exponentials) == 0:
        return out.zero_()
    factor = -grad_logprobs / (total * temperature) * ((shard_maximum - maximum) / temperature).exp()
    at_label = exponentials.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * factor + grad_logprobs / temperature
    in_place = out.data_ptr() == exponentials.data_ptr() and out.dtype == exponentials.dtype
    for block, target, factors in _row_blocks(shard_size, exponentials[:, :shard_size], out[:, :shard_size], factor):
        product = block.mul_(factors[:, None])
        if not in_place:
            target.copy_(product)
    return _finished(out, shard_size, labels, at_label)


def _finished(out: Tensor, shard_size: int, labels: Tensor, at_label: Tensor) -> Tensor:
    """Set padding to 0, and the label's entry to the sum of both terms, rounded once."""
    if shard_size < out.shape[1]:
        out[:, shard_size:] = 0.0
    row = torch.arange(len(out), device=out.device)
    # A row whose label is elsewhere gets back what it has.
    out[row, labels.clamp(min=0)] = torch.where(labels >= 0, at_label.to(out.dtype), out[:, 0])
    return out


def _bits_per_logit(temperature: float) -> float:
    """From a difference of logits to the exponent of 2: exp2 takes a third of the time of exp on the CPU.

    The difference comes first, so that large logits lose nothing.
    """
    return 1 / (temperature * math.log(2))


def _finite(maximum: Tensor) -> Tensor:
    """Replace the maximum of a row of -inf by a finite number, so that its exponentials are 0 and not NaN."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def _rows_at_a_time(logits: Tensor, shard_size: int) -> int:
    if logits.is_cuda:
        return len(logits)
    return max(1, BLOCK_BYTES // (shard_size * accumulation_dtype(logits).itemsize))


def _scratch(logits: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    rows = min(len(logits), _rows_at_a_time(logits, columns))
    return torch.empty(rows, columns, dtype=dtype, device=logits.device)


def _row_blocks(shard_size: int, logits: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the same few rows of each tensor."""
    step = _rows_at_a_time(logits, shard_size)
    return zip(*(tensor.split(step) for tensor in (logits, *columns)), strict=True)


def triton_kernels(logits: Tensor) -> ModuleType | None:
    """Return the Triton kernels for logits of at most fp32 on CUDA if Triton is installed."""
    return _imported_triton_kernels() if logits.is_cuda and logits.dtype != torch.float64 else None


@functools.cache
def _imported_triton_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("megatron_dppo.head.row_kernels_triton")
