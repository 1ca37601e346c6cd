"""A response that grows by parts: sampled by one version of the weights or several, interrupted, or given by a tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.data.routing import append_routes, missing_rows
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.types import Completion, FinishReason, RoutingShape, SamplingParams, VersionSpan


class GrowingResponse:
    """What is known so far of the response to one prompt. What was appended never changes.

    Args:
        prompt: [P] its tokens.
        topk: K of the Top-K that is recorded; 0 = none.
        routing: the shape of the routes that are recorded; None = none.
    """

    def __init__(self, prompt: Sequence[int], *, topk: int = 0, routing: RoutingShape | None = None) -> None:
        self.prompt, self._topk, self._routing = tuple(prompt), topk, routing
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._spans: list[VersionSpan] = []
        self._topk_parts: list[tuple[Tensor, Tensor]] = []
        self._routes = None if routing is None else missing_rows(0, routing)

    def request(
        self, request_id: str, params: SamplingParams, stop_token_ids: tuple[int, ...], limit: int
    ) -> GenerateRequest:
        """What a server is asked for next.

        Args:
            request_id: its name.
            params: of the whole response; its ``seed`` is that of the request.
            stop_token_ids: where it ends, besides the server's own end tokens.
            limit: new tokens at most.
        """
        return GenerateRequest(
            request_id=request_id,
            token_ids=(*self.prompt, *self.tokens),
            params=replace(params, max_new_tokens=limit),
            stop_token_ids=stop_token_ids,
            routing=self._routing,
            routing_start=0 if self._routes is None else len(self._routes),
        )

    def append_sampled(self, generation: Generation) -> None:
        """Take what a server answered to ``request``.

        Raises:
            ValueError: the answer lacks the Top-K or the routes of its tokens.
        """
        count = len(generation.token_ids)
        if not count:
            return
        start = len(self.tokens)
        self.tokens += generation.token_ids
        self._logprobs += generation.logprobs
        self._sampled += [True] * count
        for version, first, end in generation.versions:
            self._append_span(VersionSpan(version, start + first, start + end))
        if self._topk:
            if generation.topk_token_ids is None or generation.topk_logprobs is None:
                raise ValueError(f"a generation of {count} tokens without the Top-K that was asked for")
            self._topk_parts.append((generation.topk_token_ids, generation.topk_logprobs))
        if self._routes is not None:
            if generation.routed_experts is None:
                raise ValueError(f"a generation of {count} tokens without the routed experts that were asked for")
            self._routes = append_routes(self._routes, generation.routed_experts, len(self._routes))

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Take tokens that nobody sampled. Their routes come with the next sampled tokens: a server reads them then."""
        count = len(token_ids)
        self.tokens += token_ids
        self._logprobs += [0.0] * count
        self._sampled += [False] * count
        if self._topk:
            slots = (count, self._topk + 1)
            self._topk_parts.append((torch.full(slots, -1, dtype=torch.int32), torch.zeros(slots)))

    def _append_span(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.policy_version, last.end) == (span.policy_version, span.start):
            self._spans[-1] = last._replace(end=span.end)
        else:
            self._spans.append(span)

    def completion(self, reason: FinishReason, tokenizer: Any) -> Completion:
        """The response as it is now.

        Raises:
            ValueError: none of its tokens was sampled.
        """
        if not self._spans:
            raise ValueError(f"a response of {len(self.tokens)} tokens, none of them sampled")
        ids, logprobs = zip(*self._topk_parts, strict=True) if self._topk_parts else (None, None)
        return Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            policy_version=max(span.policy_version for span in self._spans),
            text=tokenizer.decode(self.tokens, skip_special_tokens=True),
            topk_token_ids=None if ids is None else torch.cat(ids),
            topk_logprobs=None if logprobs is None else torch.cat(logprobs),
            routed_experts=self._all_routes(),
            policy_versions=tuple(self._spans),
            loss_mask=None if all(self._sampled) else tuple(self._sampled),
        )

    def _all_routes(self) -> Tensor | None:
        """One row a token but the last; those of given tokens at the end, which no server read, are missing."""
        if self._routes is None or self._routing is None:
            return None
        unread = len(self.prompt) + len(self.tokens) - 1 - len(self._routes)
        return torch.cat([self._routes, missing_rows(unread, self._routing)]) if unread else self._routes
