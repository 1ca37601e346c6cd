"""Token-by-token decoding of a batch with a transformers model: repeated prompts read once, finished rows left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engines.local.sampler import RouteRecorder, Sampler, SamplingMaskRecord
from megatron_dppo.types import SamplingMask
from megatron_dppo.types.token_columns import LOGPROBS, TOPK_IDS, TOPK_LOGPROBS

_KEEP_WHILE = 0.9
"""Finished rows leave the batch when the others are less than this share: leaving copies the whole cache."""


@dataclass(frozen=True)
class Decoded:
    """Responses of a batch, ``[B, steps]``; what stands after a response's end or limit means nothing."""

    tokens: Tensor
    """int64"""
    logprobs: Tensor
    """fp32, of each token under the distribution that it was drawn from"""
    topk_ids: Tensor | None
    """int32 ``[B, steps, K+1]`` (see ``Completion``); None for K = 0"""
    topk_logprobs: Tensor | None
    """fp32 ``[B, steps, K+1]``"""
    prompt_routes: list[Tensor] | None = None
    """for each row ``[P, L, k]``, the experts of its prompt's tokens; None = not recorded"""
    sampling_mask: list[SamplingMask] | None = None
    """of each row; None = not recorded"""
    step_routes: Tensor | None = None
    """``[B, steps - 1, L, k]``, those of the response's tokens but the last one, which was never read"""

    def cpu(self) -> Decoded:
        """The same in host memory."""
        moved: dict[str, Any] = {n: v.cpu() for n, v in vars(self).items() if isinstance(v, Tensor)}
        if self.prompt_routes is not None:
            moved["prompt_routes"] = [routes.cpu() for routes in self.prompt_routes]
        if self.sampling_mask is not None:
            moved["sampling_mask"] = [mask.to(torch.device("cpu")) for mask in self.sampling_mask]
        return replace(self, **moved)

    def response(self, row: int, length: int, routing_start: int) -> dict[str, Any]:
        """Columns of a row whose response has ``length`` tokens, as a ``Generation`` holds them; routes of the
        positions from ``routing_start``."""
        columns: dict[str, Any] = {
            "token_ids": self.tokens[row, :length].int(),
            "logprobs": self.logprobs[row, :length].clone(),
        }
        if self.topk_ids is not None and self.topk_logprobs is not None:
            columns["topk_token_ids"] = self.topk_ids[row, :length].clone()
            columns["topk_logprobs"] = self.topk_logprobs[row, :length].clone()
        if self.sampling_mask is not None:
            columns["sampling_mask"] = self.sampling_mask[row][:length]
        if self.prompt_routes is not None and self.step_routes is not None:
            routes = torch.cat([self.prompt_routes[row], self.step_routes[row, : length - 1]])
            columns["routed_experts"] = routes[routing_start:]
        return columns


class DecodeRecord:
    """The responses while they grow; columns as those of ``Decoded``."""

    def __init__(
        self,
        batch: int,
        steps: int,
        topk: int,
        device: torch.device,
        prompt_routes: list[Tensor] | None,
        return_sampling_mask: bool,
    ) -> None:
        self._sampling_mask = SamplingMaskRecord(batch) if return_sampling_mask else None
        self._k, self._prompt_routes, self._step_routes = topk, prompt_routes, None
        if prompt_routes is not None:
            self._step_routes = prompt_routes[0].new_zeros(batch, steps - 1, *prompt_routes[0].shape[1:])
        self.tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
        self.logprobs = LOGPROBS.new(batch, steps, device=device)
        self.topk_ids = TOPK_IDS.new(batch, steps, topk + 1, device=device)
        self.topk_logprobs = TOPK_LOGPROBS.new(batch, steps, topk + 1, device=device)

    def add(self, step: int, rows: Tensor, chosen: Tensor, distribution: Tensor) -> None:
        """One token ``[b]`` of each of ``rows`` with the log-probabilities ``[b, V]`` of all."""
        logprobs = distribution.gather(1, chosen[:, None])
        self.tokens[rows, step] = chosen
        self.logprobs[rows, step] = logprobs.squeeze(1)
        if self._k:
            top_logprobs, top_ids = distribution.topk(self._k, dim=-1)
            if self._sampling_mask is not None:  # the set may have fewer than K
                is_cut = top_logprobs == -torch.inf
                top_ids, top_logprobs = top_ids.masked_fill(is_cut, -1), top_logprobs.masked_fill(is_cut, 0.0)
            outside = ~(top_ids == chosen[:, None]).any(-1, keepdim=True)
            ids = torch.cat([top_ids, torch.where(outside, chosen[:, None], -1)], -1)
            self.topk_ids[rows, step] = ids.int()
            self.topk_logprobs[rows, step] = torch.cat([top_logprobs, torch.where(outside, logprobs, 0.0)], -1)
        if self._sampling_mask is not None:
            self._sampling_mask.add(rows, distribution)

    def add_routes(self, step: int, rows: Tensor, routes: Tensor) -> None:
        """The experts ``[b, 1, L, k]`` of the tokens of ``step``, now that they have been read."""
        if self._step_routes is not None:
            self._step_routes[rows, step] = routes[:, 0]

    def result(self, steps: int) -> Decoded:
        """The first ``steps`` tokens."""
        return Decoded(
            self.tokens[:, :steps],
            self.logprobs[:, :steps],
            self.topk_ids[:, :steps] if self._k else None,
            self.topk_logprobs[:, :steps] if self._k else None,
            self._prompt_routes,
            None if self._sampling_mask is None else self._sampling_mask.result(),
            None if self._step_routes is None else self._step_routes[:, : steps - 1],
        )


class Ends:
    """Says which rows go on. Arguments as those of ``decode``."""

    def __init__(
        self,
        end: Set[int],
        limit: int | Sequence[int],
        further: Sequence[Sequence[int]] | None,
        ended: Callable[[list[int]], bool] | None,
        device: torch.device,
    ) -> None:
        self._ended = ended
        limits = [limit] if isinstance(limit, int) else limit
        if min(limits) < 1:
            raise ValueError(f"max_new_tokens must be above 0, got {min(limits)}")
        self.longest, self._end = max(limits), torch.tensor(sorted(end), device=device)
        self._limits = None if min(limits) == self.longest else torch.tensor(limits, device=device)
        self._further = None
        if further is not None and (width := max(map(len, further))):
            filled = [[*tokens, *[-1] * (width - len(tokens))] for tokens in further]
            self._further = torch.tensor(filled, device=device)

    def apply(self, step: int, rows: Tensor, chosen: Tensor, alive: Tensor) -> tuple[Tensor, int]:
        """Which of the rows that were ``alive [b]`` go on after the tokens ``[b]`` of ``step``, and how many; 0 also
        when the others are to stop."""
        still = alive & self._go_on(step, rows, chosen)
        left = int(still.sum())
        if self._ended is not None and (ending := rows[alive & ~still].tolist()) and self._ended(ending):
            return still, 0
        return still, left

    def _go_on(self, step: int, rows: Tensor, chosen: Tensor) -> Tensor:
        if step + 1 == self.longest:
            return torch.zeros_like(chosen, dtype=torch.bool)
        alive = ~torch.isin(chosen, self._end)
        if self._limits is not None:
            alive &= self._limits[rows] > step + 1
        if self._further is not None:
            alive &= ~(self._further[rows] == chosen[:, None]).any(1)
        return alive


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int | Sequence[int],
    end: Set[int],
    pad: int,
    further_ends: Sequence[Sequence[int]] | None = None,
    topk: int = 0,
    return_sampling_mask: bool = False,
    recorder: RouteRecorder | None = None,
    ended: Callable[[list[int]], bool] | None = None,
) -> Decoded:
    """Continue every prompt to one of the ``end`` tokens, or to ``max_new_tokens`` tokens.

    Args:
        model: a transformers causal language model.
        prompts: token ids, at least one prompt; equal ones share their first forward pass.
        sampler: chooses the tokens.
        max_new_tokens: longest response, of all rows or of each.
        end: tokens after which a response is complete.
        pad: any valid token; fills prompts on the left.
        further_ends: for each row more tokens after which it is complete.
        topk, return_sampling_mask: what is recorded besides, see ``SamplingParams``.
        recorder: watches the routers of the model; None = routes are not wanted.
        ended: is told which rows have just ended; True stops the others where they are.

    Raises:
        ValueError: a limit below 1.
    """
    device = next(model.parameters()).device
    ends = Ends(end, max_new_tokens, further_ends, ended, device)
    logits, cache, mask, routes = _read_prompts(model, prompts, pad, device, recorder)
    positions, padded = mask.sum(1), not bool(mask.all())
    rows = torch.arange(len(prompts), device=device)
    alive = rows >= 0
    record = DecodeRecord(len(prompts), ends.longest, topk, device, routes, return_sampling_mask)
    for step in range(ends.longest):
        chosen, distribution = sampler(logits, rows)
        record.add(step, rows, chosen, distribution)
        alive, left = ends.apply(step, rows, chosen, alive)
        if not left:
            return record.result(step + 1)
        if left < _KEEP_WHILE * len(rows):
            cache.batch_select_indices(alive.nonzero().squeeze(1))
            rows, chosen, mask, positions, alive = (x[alive] for x in (rows, chosen, mask, positions, alive))
        if padded:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        output = model(
            input_ids=chosen[:, None],
            attention_mask=mask if padded else None,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits, cache, positions = output.logits[:, -1], output.past_key_values, positions + 1
        if recorder is not None:
            record.add_routes(step, rows, recorder.take(len(rows)))
    raise AssertionError("no row is left after the longest limit")


def _read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], pad: int, device: torch.device, recorder: RouteRecorder | None
) -> tuple[Tensor, Any, Tensor, list[Tensor] | None]:
    """Last logits ``[B, V]``, the cache, the mask ``[B, width]`` and the routes of each row after one pass over the
    distinct prompts."""
    distinct = {tuple(p): i for i, p in enumerate(dict.fromkeys(tuple(p) for p in prompts))}
    width = max(len(p) for p in distinct)
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in distinct], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
    output = model(
        input_ids=ids,
        attention_mask=mask if not bool(mask.all()) else None,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    index = torch.tensor([distinct[tuple(p)] for p in prompts], device=device)
    output.past_key_values.batch_select_indices(index)
    routes = None
    if recorder is not None:
        read = recorder.take(len(distinct))
        routes = [read[distinct[tuple(p)], width - len(p) :] for p in prompts]
    return output.logits[index, -1], output.past_key_values, mask[index], routes
