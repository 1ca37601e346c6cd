"""A response that grows by parts: sampled by one version of the weights or several, interrupted, or given by a tool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.routing import append_routes, missing_rows
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.types import Completion, FinishReason, KeptSets, RoutingShape, SamplingParams, VersionSpan


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResponse:
    """A response that is not complete. R tokens so far, of a prompt of P."""

    token_ids: Tensor
    """[R] int32"""
    logprobs: Tensor
    """[R] float32, 0.0 at tokens that nobody sampled"""
    sampled: Tensor
    """[R] bool, False on tokens that were given by a tool"""
    versions: tuple[VersionSpan, ...]
    """which weights sampled which tokens"""
    topk_token_ids: Tensor | None = None
    """[R, K+1] int32, see ``Completion``, as for the next three"""
    topk_logprobs: Tensor | None = None
    """[R, K+1] float32"""
    kept: KeptSets | None = None
    routed_experts: Tensor | None = None
    """[positions that were read, L, k], fewer than P + R"""
    turn_ends: tuple[tuple[int, FinishReason], ...] = ()
    """(where, why) each turn of a user's function ended; the last turn may have none yet"""
    parts: int = 0
    """requests that it took so far"""


class GrowingResponse:
    """What is known so far of the response to one prompt. What was appended never changes.

    Args:
        prompt: [P] its tokens.
        topk: K of the Top-K that is recorded; 0 = none.
        routing: the shape of the routes that are recorded; None = none.
        kept: whether kept sets are recorded.
    """

    def __init__(
        self, prompt: Sequence[int], *, topk: int = 0, routing: RoutingShape | None = None, kept: bool = False
    ) -> None:
        self.prompt, self._topk, self._routing = tuple(prompt), topk, routing
        self.tokens = array("i")
        self._logprobs, self._sampled = array("f"), bytearray()
        self._spans: list[VersionSpan] = []
        self._topk_parts: list[tuple[Tensor, Tensor]] = []
        self._kept = [KeptSets.none(0)] if kept else None
        self._routes = None if routing is None else missing_rows(0, routing)
        self.turn_ends: list[tuple[int, FinishReason]] = []
        """see ``PartialResponse``"""
        self.parts = 0
        """answers that were appended"""

    def fresh(self) -> GrowingResponse:
        """An empty one to the same prompt. Its requests get other seeds than those that were made."""
        found = GrowingResponse(self.prompt, topk=self._topk, routing=self._routing, kept=self._kept is not None)
        found.parts = self.parts
        return found

    def state(self) -> PartialResponse:
        """All of it, to be kept."""
        ids, logprobs = self._topk_columns()
        return PartialResponse(
            token_ids=_tensor(self.tokens, np.int32),
            logprobs=_tensor(self._logprobs, np.float32),
            sampled=_tensor(self._sampled, np.bool_),
            versions=tuple(self._spans),
            topk_token_ids=ids,
            topk_logprobs=logprobs,
            kept=self._kept_sets(),
            routed_experts=self._routes,
            turn_ends=tuple(self.turn_ends),
            parts=self.parts,
        )

    def take(self, state: PartialResponse) -> None:
        """Go on from a state of a response to the same prompt.

        Raises:
            ValueError: it lacks the Top-K, the routes or the kept sets that are recorded here.
        """
        lacks_topk = self._topk and (state.topk_token_ids is None or state.topk_token_ids.shape[1] != self._topk + 1)
        lacks_routes = self._routing is not None and state.routed_experts is None
        if len(state.token_ids) and (lacks_topk or lacks_routes or (self._kept is not None and state.kept is None)):
            raise ValueError(
                f"a response of {len(state.token_ids)} tokens without the Top-K, routes or kept sets of this run"
            )
        self.tokens, self._logprobs = array("i"), array("f")
        self.tokens.frombytes(state.token_ids.numpy().tobytes())
        self._logprobs.frombytes(state.logprobs.numpy().tobytes())
        self._sampled, self._spans = bytearray(state.sampled.numpy().tobytes()), list(state.versions)
        if self._topk and state.topk_token_ids is not None and state.topk_logprobs is not None:
            self._topk_parts = [(state.topk_token_ids, state.topk_logprobs)]
        if self._routing is not None and state.routed_experts is not None:
            self._routes = state.routed_experts
        if self._kept is not None and state.kept is not None:
            self._kept = [state.kept]
        self.turn_ends, self.parts = list(state.turn_ends), state.parts

    def cut(self, length: int) -> None:
        """Forget what comes after the first ``length`` tokens."""
        if length >= len(self.tokens):
            return
        for column in (self.tokens, self._logprobs, self._sampled):
            del column[length:]
        self._spans = [span._replace(end=min(span.end, length)) for span in self._spans if span.start < length]
        ids, logprobs = self._topk_columns()
        if ids is not None and logprobs is not None:
            self._topk_parts = [(ids[:length], logprobs[:length])]
        if (kept := self._kept_sets()) is not None:
            self._kept = [kept[:length]]
        if self._routes is not None:
            # The last token that is left may go on differently: nobody has read it yet.
            self._routes = self._routes[: max(0, len(self.prompt) + length - 1)]
        self.turn_ends = [(end, why) for end, why in self.turn_ends if end <= length]

    @property
    def lacks_routes(self) -> bool:
        """Whether routes are recorded, and there are none yet."""
        return self._routes is not None and not len(self._routes)

    def was_sampled(self, start: int, end: int) -> bool:
        """Whether any of these tokens was sampled."""
        return any(self._sampled[start:end])

    def request(
        self,
        request_id: str,
        params: SamplingParams,
        stop_token_ids: tuple[int, ...],
        limit: int,
        *,
        prompt_routes: bool = True,
    ) -> GenerateRequest:
        """What a server is asked for next.

        Args:
            request_id: its name.
            params: of the whole response; its ``seed`` is that of the request.
            stop_token_ids: where it ends, besides the server's own end tokens.
            limit: new tokens at most.
            prompt_routes: whether the routes of the prompt's tokens are wanted, where none are known. That of its last
                token always is: it is read anew for each response.
        """
        known = 0 if self._routes is None else len(self._routes)
        return GenerateRequest(
            request_id=request_id,
            token_ids=(*self.prompt, *self.tokens),
            params=replace(params, max_new_tokens=limit),
            stop_token_ids=stop_token_ids,
            routing=self._routing,
            routing_start=known if known or prompt_routes else len(self.prompt) - 1,
        )

    def append_sampled(self, generation: Generation) -> None:
        """Take what a server answered to ``request``.

        Raises:
            ValueError: the answer lacks the Top-K, the routes or the kept sets of its tokens.
        """
        count = len(generation.token_ids)
        self.parts += 1
        if not count:
            return
        start = len(self.tokens)
        self.tokens.frombytes(generation.token_ids.numpy().tobytes())
        self._logprobs.frombytes(generation.logprobs.numpy().tobytes())
        self._sampled += bytes([True]) * count
        for version, first, end in generation.versions:
            self._append_span(VersionSpan(version, start + first, start + end))
        if self._topk:
            if generation.topk_token_ids is None or generation.topk_logprobs is None:
                raise ValueError(f"a generation of {count} tokens without the Top-K that was asked for")
            self._topk_parts.append((generation.topk_token_ids, generation.topk_logprobs))
        if self._kept is not None:
            if generation.kept is None:
                raise ValueError(f"a generation of {count} tokens without the kept sets that were asked for")
            self._kept.append(generation.kept)
        if self._routes is not None:
            if generation.routed_experts is None:
                raise ValueError(f"a generation of {count} tokens without the routed experts that were asked for")
            self._routes = append_routes(self._routes, generation.routed_experts, len(self._routes))

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Take tokens that nobody sampled. Their routes come with the next sampled tokens: a server reads them then."""
        count = len(token_ids)
        self.tokens.extend(token_ids)
        self._logprobs.extend([0.0] * count)
        self._sampled += bytes(count)
        if self._topk:
            slots = (count, self._topk + 1)
            self._topk_parts.append((torch.full(slots, -1, dtype=torch.int32), torch.zeros(slots)))
        if self._kept is not None:
            self._kept.append(KeptSets.none(count))

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
        ids, logprobs = self._topk_columns()
        return Completion(
            token_ids=_tensor(self.tokens, np.int32),
            logprobs=_tensor(self._logprobs, np.float32),
            finish_reason=reason,
            policy_version=max(span.policy_version for span in self._spans),
            text=tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True),
            topk_token_ids=ids,
            topk_logprobs=logprobs,
            kept=self._kept_sets(),
            routed_experts=self._all_routes(),
            policy_versions=tuple(self._spans),
            loss_mask=None if all(self._sampled) else _tensor(self._sampled, np.bool_),
        )

    def _topk_columns(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self._topk_parts:
            return None, None
        if len(self._topk_parts) > 1:
            ids, logprobs = zip(*self._topk_parts, strict=True)
            self._topk_parts = [(torch.cat(ids), torch.cat(logprobs))]
        return self._topk_parts[0]

    def _kept_sets(self) -> KeptSets | None:
        if self._kept is None:
            return None
        if len(self._kept) > 1:
            self._kept = [KeptSets.cat(self._kept)]
        return self._kept[0]

    def _all_routes(self) -> Tensor | None:
        """One row a token but the last; those of given tokens at the end, which no server read, are missing."""
        if self._routes is None or self._routing is None:
            return None
        unread = len(self.prompt) + len(self.tokens) - 1 - len(self._routes)
        return torch.cat([self._routes, missing_rows(unread, self._routing)]) if unread else self._routes


def _tensor(column: array[Any] | bytearray, dtype: Any) -> Tensor:
    """A copy, in host memory."""
    return torch.from_numpy(np.frombuffer(column, dtype=dtype).copy())
