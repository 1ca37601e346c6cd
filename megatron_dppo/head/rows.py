"""From the shards' row statistics to those of the whole vocabulary.

Each shard sends m, t, o, y and y_i of ``row_kernels.row_statistics``: 4 (4 + K) bytes a row in fp32, and q if asked.
With M the largest m, d = (m - M) / temperature and S the sum over shards:

    o = S exp(d) o_r        y = max over shards of y_r + d        s = o + exp(y) + sum exp(y_i)      (no id twice)
    t = S exp(d) (t_r + d s_r)      log p(id) = y_i - log s
    log p(other) = log o - log s        entropy = log s - t / s        sum of p^2 over other = S exp(2 d) q_r / s^2

Every sum has positive terms only, so ``other`` keeps its relative precision where the ids hold almost all of the mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.mixed_gemm import accumulation_dtype, is_half, logits_into
from megatron_dppo.head.row_kernels import gradient_of_exponentials, row_gradient, row_statistics, row_statistics_torch
from megatron_dppo.head.vocab_topk import keep_only_
from megatron_dppo.types import SamplingMask


class SlotGradient(NamedTuple):
    """Gradient at the Top-K ids of some rows."""

    ids: Tensor
    """Index in this shard, -1 for another shard's id or an unused slot. Shape [n, K]."""
    gradient: Tensor
    """Derivative of the loss by log p(id), for the ids of all shards; 0 in unused slots. Shape [n, K]."""

    @classmethod
    def select(cls, ids: Tensor | None, gradient: Tensor | None, rows: slice) -> SlotGradient | None:
        """Return that of some rows; None without a gradient."""
        return None if ids is None or gradient is None else cls(ids[rows], gradient[rows])

    def total(self, grad_logprobs: Tensor) -> Tensor:
        """Return the derivative by all log-probabilities of a row, g, including that by log p(label). Shape [n]."""
        return grad_logprobs + self.gradient.sum(1)


def chosen_entries(labels: Tensor, slots: SlotGradient, grad_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices ``[n, 1 + K]`` of label and ids in this shard, or -1, and the derivative b of each."""
    ids, of_ids = slots.ids, slots.gradient
    both = (ids == labels[:, None]) & (ids >= 0)
    of_label = grad_logprobs + torch.where(both, of_ids, 0.0).sum(1)
    of_ids = of_ids + torch.where(both, grad_logprobs[:, None], 0.0)
    return torch.cat([labels[:, None], ids], 1), torch.cat([of_label[:, None], of_ids], 1)


def write_entries(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Write ``values [n, S]`` at ``places [n, S]`` of ``out [n, W]``; nothing is written where a place is -1.

    A place that stands twice in a row has the same value twice. Without a search for the used ones, which would wait
    for the device: an unused place repeats a used one, or what the row has. By index and not by ``scatter_``, which on
    the CPU takes a bf16 or fp16 tensor through an fp32 copy of all of it (torch 2.13).
    """
    used = places >= 0
    last = places.argmax(1, keepdim=True)
    at = torch.where(used, places, places.gather(1, last)).clamp(min=0)
    values = torch.where(used, values, values.gather(1, last)).to(out.dtype)
    values = torch.where(used.any(1, keepdim=True), values, out[:, :1])
    out[torch.arange(len(out), device=out.device)[:, None], at] = values
    return out


class RowTotals(NamedTuple):
    """Statistics over the whole vocabulary, equal on all ranks of the group; without gradient."""

    maximum: Tensor
    """[n] the largest logit, before the temperature"""
    total: Tensor
    """[n] sum of exp((logit - maximum) / temperature)"""
    logprobs: Tensor
    """[n]"""
    entropy: Tensor
    """[n]"""
    id_logprobs: Tensor | None
    """[n, K], -inf in unused slots"""
    other_logprob: Tensor | None
    """[n]"""
    other_square: Tensor | None = None
    """[n] sum of p^2 over the entries outside the label and the ids"""

    def select(self, rows: slice) -> RowTotals:
        """Return some of the rows."""
        return RowTotals(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the output layer, and its position in the vocabulary."""

    weight: Tensor
    bias: Tensor | None
    group: ProcessGroup | None
    """Vocabulary-parallel group. None: one shard holds the whole vocabulary."""
    first: int
    """Global id of the shard's first entry."""
    shard_size: int
    temperature: float

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup | None,
        vocab_size: int,
        temperature: float,
    ) -> VocabShard:
        """Check the arguments, which are the same on every rank, and build the shard."""
        _check_layer(hidden, weight, bias)
        shards, rank, width = (1, 0, len(weight)) if group is None else (group.size(), group.rank(), len(weight))
        if not 0 < vocab_size <= width * shards:
            raise ValueError(f"vocab_size = {vocab_size} does not fit {shards} shards of {width} rows of the weight")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        # A group of one needs no collectives.
        group = group if shards > 1 else None
        # The padding is at the end of the vocabulary: the last shards may hold some, or nothing else.
        shard_size = max(0, min(vocab_size - rank * width, width))
        # Detached, because the head forms its gradients itself.
        return cls(
            weight.detach(), None if bias is None else bias.detach(), group, rank * width, shard_size, temperature
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and statistics."""
        return accumulation_dtype(self.weight)

    def local(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the indices in this shard of global ids; -1 for ids of other shards and invalid ones."""
        is_local = (ids >= self.first) & (ids < self.first + self.shard_size)
        return torch.where(is_local if valid is None else is_local & valid, ids - self.first, -1)

    def new_logits(self, rows: int) -> Tensor:
        """Allocate memory for the logits of ``rows`` rows."""
        return torch.empty(rows, len(self.weight), dtype=self.dtype, device=self.weight.device)

    def logits(self, hidden: Tensor, out: Tensor, sampling_mask: SamplingMask | None = None) -> Tensor:
        """Return logits ``[n, W]`` before the temperature, in the first n rows of ``out``; -inf outside the mask."""
        logits = logits_into(hidden, self.weight, self.bias, out[: len(hidden)])
        if sampling_mask is None:
            return logits
        return keep_only_(logits, sampling_mask.ids, sampling_mask.counts, self.first, self.shard_size)

    def statistics(
        self, logits: Tensor, labels: Tensor, ids: Tensor | None, *, squares: bool = False, overwrite: bool = False
    ) -> Tensor:
        """Return ``row_kernels.row_statistics`` of this shard; with ``overwrite`` exponentials replace the logits."""
        if overwrite:
            return row_statistics_torch(logits, self.shard_size, labels, ids, self.temperature, squares, overwrite=True)
        return row_statistics(logits, self.shard_size, labels, ids, self.temperature, squares)

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        totals: RowTotals,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        out: Tensor,
        overwritten: Tensor | None = None,
        slots: SlotGradient | None = None,
    ) -> Tensor:
        """Write the gradient of the logits ``[n, W]`` (or ``overwritten``, exponentials) to ``out`` and return it."""
        if slots is not None:
            # The values at label and ids come first: the gradient may be written over the logits.
            places, values = self._at_slots(logits, labels, totals, grad_logprobs, grad_entropy, overwritten, slots)
            together = slots.total(grad_logprobs)
            self.gradient(logits, labels, totals, together, grad_entropy, out, overwritten)
            return write_entries(out, places, values) if self.shard_size else out
        maximum, total, *_ = totals
        if overwritten is not None:
            return gradient_of_exponentials(
                logits, self.shard_size, labels, overwritten, maximum, total, grad_logprobs, self.temperature, out
            )
        return row_gradient(
            logits,
            self.shard_size,
            labels,
            maximum,
            total,
            grad_logprobs,
            grad_entropy,
            totals.entropy,
            self.temperature,
            out,
        )

    def _at_slots(
        self,
        logits: Tensor,
        labels: Tensor,
        totals: RowTotals,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        overwritten: Tensor | None,
        slots: SlotGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return the indices of label and ids in this shard ``[n, 1 + K]``, and the gradient of their logits."""
        places, derivative = chosen_entries(labels, slots, grad_logprobs)
        if not self.shard_size:
            return places, derivative
        chosen_logits = logits.gather(1, places.clamp(min=0)).to(totals.total.dtype)
        maximum = totals.maximum[:, None]
        factor = slots.total(grad_logprobs)[:, None]
        if overwritten is not None:
            # These are exponentials relative to the shard's maximum, here brought to that of the row.
            p = chosen_logits * (((overwritten[:, None] - maximum) / self.temperature).exp() / totals.total[:, None])
        else:
            z = (chosen_logits - maximum) / self.temperature
            p = z.exp() / totals.total[:, None]
            if grad_entropy is not None:
                log_p = z.clamp(min=-1e4) - totals.total.log()[:, None]
                factor = factor + grad_entropy[:, None] * (log_p + totals.entropy[:, None])
        return places, (derivative - p * factor) / self.temperature


def gather_shards(shard_statistics: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """All-gather ``[n, C]`` of each rank to ``[ranks, n, C]``, ready when the returned work is done (None: ready)."""
    # Every rank of the group has the same rows, so all of them skip an empty collective.
    if group is None or shard_statistics.numel() == 0:
        return shard_statistics[None].expand(1 if group is None else group.size(), *shard_statistics.shape), None
    parts = shard_statistics.new_empty(group.size(), *shard_statistics.shape)
    return parts, dist.all_gather_into_tensor(parts.flatten(0, 1), shard_statistics, group=group, async_op=True)


def merge(parts: Tensor, labels: Tensor, ids: Tensor | None, valid: Tensor | None, temperature: float) -> RowTotals:
    """Merge the shards' statistics ``[ranks, n, 4 + K]``, or one column more, to the totals of the rows; see above.

    ``labels [n]``, ``ids [n, K]`` and ``valid [n, K]`` are global. A row whose entries are all -inf gives NaN.
    """
    slots = 4 + (0 if ids is None else ids.shape[1])
    # Columns m, t, o, and y of label and ids.
    maxima = parts[..., 0]
    weighted = parts[..., 1]
    other_sums = parts[..., 2]
    values = parts[..., 3:slots]
    squares = parts[..., slots] if parts.shape[-1] > slots else None
    if ids is not None and valid is not None:
        # The label counts once: where it is one of the ids too, only there.
        repeated = ((ids == labels[:, None]) & valid).any(1)
        counted = torch.cat([~repeated[:, None], valid], 1)
    else:
        counted = torch.ones_like(labels, dtype=torch.bool)[:, None]
    maximum = maxima.amax(0)
    shift = (maxima - maximum) / temperature
    scale = shift.exp()
    sums = other_sums + torch.where(counted, values.exp(), 0.0).sum(-1)
    # A shard of -inf only: its shift is -inf, and 0 times it must be 0.
    weighted = torch.where(scale == 0, 0.0, scale * (weighted + shift * sums)).sum(0)
    other = (scale * other_sums).sum(0)
    values = (values + shift[..., None]).amax(0)
    total = other + torch.where(counted, values.exp(), 0.0).sum(-1)
    log_total = total.log()
    logprobs = values - log_total[:, None]
    return RowTotals(
        maximum=maximum,
        total=total,
        logprobs=logprobs[:, 0],
        entropy=log_total - weighted / total,
        id_logprobs=None if valid is None else torch.where(valid, logprobs[:, 1:], -torch.inf),
        other_logprob=None if valid is None else other.log() - log_total,
        other_square=None if squares is None else (scale.square() * squares).sum(0) / total.square(),
    )


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [T, H] and weight [V_local, H], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [V_local] = ({len(weight)},), got {tuple(bias.shape)}")
    if hidden.dtype not in (torch.float32, torch.float64) and not is_half(hidden.dtype):
        raise ValueError(f"hidden must be float32, float64, bfloat16 or float16, got {hidden.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected that of hidden, "
                f"{hidden.dtype} on {hidden.device}"
            )
