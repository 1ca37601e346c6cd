"""Token-by-token decoding of a batch with a transformers model.

Repeated prompts are read once, and finished rows leave the batch.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from megatron_dppo.engines.local.sampler import RouteRecorder, Sampler, SamplingMaskRecord
from megatron_dppo.types import SamplingMask
from megatron_dppo.types.token_columns import LOGPROBS, TOPK_IDS, TOPK_LOGPROBS

COMPACTION_SHARE = 0.9
"""Share of unfinished rows below which finished rows leave the batch: leaving copies the complete cache."""

COLUMNS_ON_REQUEST: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {}
"""Function of each column on request, by its field of a response: (log-probabilities of all tokens ``[b, V]``, sampled
tokens ``[b]``) to numbers ``[b]``."""


@dataclass(frozen=True)
class Decoded:
    """Responses of a batch of B rows. Values after the end of a response are undefined."""

    tokens: Tensor
    """Sampled tokens, int64 [B, steps]."""
    logprobs: Tensor
    """Log-probability of each token under the distribution that it was sampled from, fp32 [B, steps]."""
    topk_ids: Tensor | None
    """Top-K ids, int32 [B, steps, K + 1] (see ``Completion``). None for K = 0."""
    topk_logprobs: Tensor | None
    """Top-K log-probabilities, fp32 [B, steps, K + 1]."""
    prompt_routes: list[Tensor] | None = None
    """Experts of the prompt tokens of each row, [P, L, k]. None: not recorded."""
    sampling_mask: list[SamplingMask] | None = None
    """Token ids that the filters allowed in each row. None: not recorded."""
    step_routes: Tensor | None = None
    """Experts of all response tokens but the last, which was never read, [B, steps - 1, L, k]."""
    on_request: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns on request, fp32 [B, steps] each, by their field of a response."""

    def cpu(self) -> Self:
        """Return a copy in host memory."""
        moved: dict[str, Any] = {n: v.cpu() for n, v in vars(self).items() if isinstance(v, Tensor)}
        if self.prompt_routes is not None:
            moved["prompt_routes"] = [routes.cpu() for routes in self.prompt_routes]
        if self.sampling_mask is not None:
            moved["sampling_mask"] = [mask.to(torch.device("cpu")) for mask in self.sampling_mask]
        moved["on_request"] = {name: rows.cpu() for name, rows in self.on_request.items()}
        return replace(self, **moved)

    def row_columns(self, row: int, length: int, routing_start: int) -> dict[str, Any]:
        """Return the columns of one response as a ``Generation`` holds them."""
        columns: dict[str, Any] = {
            "token_ids": self.tokens[row, :length].int(),
            "logprobs": self.logprobs[row, :length].clone(),
        }
        if self.topk_ids is not None and self.topk_logprobs is not None:
            columns["topk_token_ids"] = self.topk_ids[row, :length].clone()
            columns["topk_logprobs"] = self.topk_logprobs[row, :length].clone()
        columns |= {name: rows[row, :length].clone() for name, rows in self.on_request.items()}
        if self.sampling_mask is not None:
            columns["sampling_mask"] = self.sampling_mask[row][:length]
        if self.prompt_routes is not None and self.step_routes is not None:
            routes = torch.cat([self.prompt_routes[row], self.step_routes[row, : length - 1]])
            columns["routed_experts"] = routes[routing_start:]
        return columns


class DecodeRecord:
    """Recorder of responses during decoding; its columns are those of ``Decoded``."""

    def __init__(
        self,
        batch: int,
        steps: int,
        topk: int,
        device: torch.device,
        prompt_routes: list[Tensor] | None,
        return_sampling_mask: bool,
        columns: Sequence[str] = (),
    ) -> None:
        self._on_request = {name: torch.zeros(batch, steps, device=device) for name in columns}
        self._sampling_mask = SamplingMaskRecord(batch) if return_sampling_mask else None
        self._topk = topk
        self._prompt_routes = prompt_routes
        self._step_routes: Tensor | None = None
        if prompt_routes is not None:
            self._step_routes = prompt_routes[0].new_zeros(batch, steps - 1, *prompt_routes[0].shape[1:])
        self.tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
        self.logprobs = LOGPROBS.new(batch, steps, device=device)
        self.topk_ids = TOPK_IDS.new(batch, steps, topk + 1, device=device)
        self.topk_logprobs = TOPK_LOGPROBS.new(batch, steps, topk + 1, device=device)

    def add(self, step: int, rows: Tensor, sampled: Tensor, distribution: Tensor) -> None:
        """Record a token of each of some rows, [b], and the log-probabilities of all tokens, [b, V]."""
        logprobs = distribution.gather(1, sampled[:, None])
        self.tokens[rows, step] = sampled
        self.logprobs[rows, step] = logprobs.squeeze(1)
        if self._topk:
            top_logprobs, top_ids = distribution.topk(self._topk, dim=-1)
            if self._sampling_mask is not None:  # the filters may allow fewer than K ids
                is_cut = top_logprobs == -torch.inf
                top_ids = top_ids.masked_fill(is_cut, -1)
                top_logprobs = top_logprobs.masked_fill(is_cut, 0.0)
            # The last slot holds the sampled token where it is not among the Top-K; -1 marks it as unused.
            is_outside = ~(top_ids == sampled[:, None]).any(-1, keepdim=True)
            ids = torch.cat([top_ids, torch.where(is_outside, sampled[:, None], -1)], -1)
            self.topk_ids[rows, step] = ids.int()
            self.topk_logprobs[rows, step] = torch.cat([top_logprobs, torch.where(is_outside, logprobs, 0.0)], -1)
        if self._sampling_mask is not None:
            self._sampling_mask.add(rows, distribution)
        for name, column in self._on_request.items():
            column[rows, step] = COLUMNS_ON_REQUEST[name](distribution, sampled)

    def add_routes(self, step: int, rows: Tensor, routes: Tensor) -> None:
        """Record the experts ``[b, 1, L, k]`` of the tokens of ``step``, which have just been read."""
        if self._step_routes is not None:
            self._step_routes[rows, step] = routes[:, 0]

    def result(self, steps: int) -> Decoded:
        """Return the first ``steps`` tokens."""
        return Decoded(
            self.tokens[:, :steps],
            self.logprobs[:, :steps],
            self.topk_ids[:, :steps] if self._topk else None,
            self.topk_logprobs[:, :steps] if self._topk else None,
            self._prompt_routes,
            None if self._sampling_mask is None else self._sampling_mask.result(),
            None if self._step_routes is None else self._step_routes[:, : steps - 1],
            {name: column[:, :steps] for name, column in self._on_request.items()},
        )


class StopCriteria:
    """Rule for the end of each response. The arguments are those of ``decode``."""

    def __init__(
        self,
        end_tokens: Set[int],
        max_new_tokens: int | Sequence[int],
        extra_end_tokens: Sequence[Sequence[int]] | None,
        should_stop: Callable[[list[int]], bool] | None,
        device: torch.device,
    ) -> None:
        self._should_stop = should_stop
        limits = [max_new_tokens] if isinstance(max_new_tokens, int) else max_new_tokens
        if min(limits) < 1:
            raise ValueError(f"max_new_tokens must be above 0, got {min(limits)}")
        self.longest = max(limits)
        self._end_tokens = torch.tensor(sorted(end_tokens), device=device)
        self._limits = None if min(limits) == self.longest else torch.tensor(limits, device=device)
        self._extra_end_tokens = None
        if extra_end_tokens is not None and (width := max(map(len, extra_end_tokens))):
            # -1 is no token, so a padded entry never ends a response.
            padded = [[*tokens, *[-1] * (width - len(tokens))] for tokens in extra_end_tokens]
            self._extra_end_tokens = torch.tensor(padded, device=device)

    def update(self, step: int, rows: Tensor, sampled: Tensor, is_active: Tensor) -> tuple[Tensor, int]:
        """Return which rows continue after the tokens of ``step``, [b], and the number of rows to decode further.

        ``is_active`` [b]: rows that had not ended before. The number is 0 also if ``should_stop`` stops the others.
        """
        is_continuing = is_active & self._continues(step, rows, sampled)
        # Waits for the device, once a step.
        num_continuing = int(is_continuing.sum())
        if self._should_stop is not None:
            finished = rows[is_active & ~is_continuing].tolist()
            if finished and self._should_stop(finished):
                return is_continuing, 0
        return is_continuing, num_continuing

    def _continues(self, step: int, rows: Tensor, sampled: Tensor) -> Tensor:
        if step + 1 == self.longest:
            return torch.zeros_like(sampled, dtype=torch.bool)
        continues = ~torch.isin(sampled, self._end_tokens)
        if self._limits is not None:
            continues &= self._limits[rows] > step + 1
        if self._extra_end_tokens is not None:
            continues &= ~(self._extra_end_tokens[rows] == sampled[:, None]).any(1)
        return continues


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int | Sequence[int],
    end_tokens: Set[int],
    pad_token: int,
    extra_end_tokens: Sequence[Sequence[int]] | None = None,
    topk: int = 0,
    return_sampling_mask: bool = False,
    columns: Sequence[str] = (),
    recorder: RouteRecorder | None = None,
    should_stop: Callable[[list[int]], bool] | None = None,
) -> Decoded:
    """Continue every prompt up to an end token or ``max_new_tokens`` tokens.

    Long because one loop changes the whole state of the batch: rows, mask, positions and cache.

    Equal prompts share their first forward pass; ``pad_token``, any valid token, pads shorter ones on the left. After
    each step ``should_stop`` is called with the rows that have just ended, and True stops all other rows.
    """
    device = next(model.parameters()).device
    criteria = StopCriteria(end_tokens, max_new_tokens, extra_end_tokens, should_stop, device)

    # Prefill
    logits, cache, mask, routes = _prefill(model, prompts, pad_token, device, recorder)
    positions = mask.sum(1)
    # Without padding the model gets no mask and may use its faster causal kernel.
    is_padded = not bool(mask.all())
    # Rows of the batch that are still decoded: compaction removes rows, and results are stored by these numbers.
    rows = torch.arange(len(prompts), device=device)
    # All True.
    is_active = rows >= 0
    record = DecodeRecord(len(prompts), criteria.longest, topk, device, routes, return_sampling_mask, columns)

    for step in range(criteria.longest):
        sampled, distribution = sampler(logits, rows)
        record.add(step, rows, sampled, distribution)
        is_active, num_active = criteria.update(step, rows, sampled, is_active)
        if not num_active:
            return record.result(step + 1)
        if num_active < COMPACTION_SHARE * len(rows):
            _select_rows(cache, is_active.nonzero().squeeze(1))
            rows, sampled, mask, positions, is_active = (
                x[is_active] for x in (rows, sampled, mask, positions, is_active)
            )
        if is_padded:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        output = model(
            input_ids=sampled[:, None],
            attention_mask=mask if is_padded else None,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]
        cache = output.past_key_values
        positions = positions + 1
        if recorder is not None:
            # This pass has read the token of ``step``, so the routes belong to it and not to the next one.
            record.add_routes(step, rows, recorder.pop_routes(len(rows)))
    raise AssertionError("no row is left after the longest limit")


def _select_rows(cache: Any, index: Tensor) -> None:
    """Keep these rows of a cache, in this order; a row may be repeated."""
    for layer in cache.layers:
        # The recurrent states of linear attention have only the method of beam search, which does the same.
        select = getattr(layer, "batch_select_indices", None) or layer.reorder_cache
        select(index)


def _prefill(
    model: Any, prompts: Sequence[Sequence[int]], pad_token: int, device: torch.device, recorder: RouteRecorder | None
) -> tuple[Tensor, Any, Tensor, list[Tensor] | None]:
    """Read each distinct prompt once.

    Return the logits after the last token [B, V], the key-value cache, the mask [B, width], and the routes by row.
    """
    distinct = {tuple(p): i for i, p in enumerate(dict.fromkeys(tuple(p) for p in prompts))}
    width = max(len(p) for p in distinct)
    # Padding on the left, so that the last column holds the last token of every prompt.
    ids = torch.tensor([[pad_token] * (width - len(p)) + list(p) for p in distinct], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
    output = model(
        input_ids=ids,
        attention_mask=mask if not bool(mask.all()) else None,
        # Positions count real tokens. Padding gets 0, and nothing attends to it.
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    # Copies the cache of a prompt to each of its responses.
    index = torch.tensor([distinct[tuple(p)] for p in prompts], device=device)
    _select_rows(output.past_key_values, index)
    routes = None
    if recorder is not None:
        distinct_routes = recorder.pop_routes(len(distinct))
        routes = [distinct_routes[distinct[tuple(p)], width - len(p) :] for p in prompts]
    return output.logits[index, -1], output.past_key_values, mask[index], routes
