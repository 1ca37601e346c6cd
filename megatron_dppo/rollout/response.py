"""A response that grows by parts: sampled by one version of the weights or several, interrupted, or given by a tool."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.routing import missing_rows
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.types import (
    Completion,
    FinishReason,
    ResponseColumns,
    RoutingShape,
    SamplingParams,
    VersionSpan,
)
from megatron_dppo.types.token_columns import (
    LOGPROBS,
    ROUTES,
    SAMPLED,
    TOKEN_COLUMNS,
    GrowingColumn,
    append_span,
    asked_columns,
    cut_spans,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResponse(ResponseColumns):
    """A response that is not complete. R tokens so far, of a prompt of P; routes of fewer than P + R positions."""

    token_ids: Tensor
    """[R] int32"""
    logprobs: Tensor
    """[R] float32, 0.0 at tokens that nobody sampled"""
    sampled: Tensor
    """[R] bool, False on tokens that were given by a tool"""
    versions: tuple[VersionSpan, ...]
    """which weights sampled which tokens"""
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
        sampling_mask: whether sampling masks are recorded.
        columns: what else is recorded, see ``types.token_columns.asked_columns``.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        topk: int = 0,
        routing: RoutingShape | None = None,
        sampling_mask: bool = False,
        columns: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self._routing = routing
        self.tokens = array("i")
        self._spans: list[VersionSpan] = []
        self._logprobs = GrowingColumn(LOGPROBS, LOGPROBS.empty(()), len(self.prompt))
        self._sampled = GrowingColumn(SAMPLED, SAMPLED.empty(()), len(self.prompt))
        asked = SamplingParams(max_new_tokens=0, topk_logprobs=topk, return_sampling_mask=sampling_mask)
        shapes = {**asked_columns(asked), **(columns or {})}
        self._optional = {
            c.response: GrowingColumn(c, c.empty(shapes[c.response]), len(self.prompt))
            for c in TOKEN_COLUMNS
            if c.response in shapes
        }
        if routing is not None:
            self._optional["routed_experts"] = GrowingColumn(ROUTES, missing_rows(0, routing), len(self.prompt))
        self.turn_ends: list[tuple[int, FinishReason]] = []
        """see ``PartialResponse``"""
        self.parts = 0
        """answers that were appended"""

    def fresh(self) -> GrowingResponse:
        """An empty one to the same prompt. Its requests get other seeds than those that were made."""
        found = GrowingResponse(self.prompt, routing=self._routing)
        found._optional = {name: column.fresh() for name, column in self._optional.items()}
        found.parts = self.parts
        return found

    def state(self) -> PartialResponse:
        """All of it, to be sampling_mask."""
        optional: dict[str, Any] = {name: column.rows for name, column in self._optional.items()}
        return PartialResponse(
            token_ids=self._token_ids(),
            logprobs=self._logprobs.tensor,
            sampled=self._sampled.tensor,
            versions=tuple(self._spans),
            turn_ends=tuple(self.turn_ends),
            parts=self.parts,
            **optional,
        )

    def take(self, state: PartialResponse) -> None:
        """Go on from a state of a response to the same prompt.

        Raises:
            ValueError: it lacks a column that is recorded here, or has it in another form.
        """
        given = {name: getattr(state, name) for name in self._optional}
        lacking = [column.column.title for name, column in self._optional.items() if not column.fits(given[name])]
        if len(state.token_ids) and lacking:
            raise ValueError(
                f"a response of {len(state.token_ids)} tokens without the Top-K, routes or sampling masks of this run; "
                f"it lacks {', '.join(lacking)}"
            )
        self.tokens = array("i", state.token_ids.numpy().tobytes())
        self._spans = list(state.versions)
        self.turn_ends, self.parts = list(state.turn_ends), state.parts
        self._logprobs.replace(state.logprobs)
        self._sampled.replace(state.sampled)
        for name, column in self._optional.items():
            if column.fits(given[name]):
                column.replace(given[name])

    def cut(self, length: int) -> None:
        """Forget what comes after the first ``length`` tokens."""
        if length >= len(self.tokens):
            return
        del self.tokens[length:]
        self._spans = cut_spans(self._spans, length)
        for column in self._columns():
            column.cut(length)
        self.turn_ends = [(end, why) for end, why in self.turn_ends if end <= length]

    @property
    def lacks_routes(self) -> bool:
        """Whether routes are recorded, and there are none yet."""
        return self._routing is not None and not self._known_routes()

    def was_sampled(self, start: int, end: int) -> bool:
        """Whether any of these tokens was sampled."""
        return bool(self._sampled.tensor[start:end].any())

    def was_all_sampled(self, start: int, end: int) -> bool:
        """Whether each of these tokens was sampled."""
        return bool(self._sampled.tensor[start:end].all())

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
        known = self._known_routes()
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
            ValueError: the answer lacks the Top-K, the routes or the sampling masks of its tokens.
        """
        count = len(generation.token_ids)
        self.parts += 1
        if not count:
            return
        start = len(self.tokens)
        self.tokens.frombytes(generation.token_ids.numpy().tobytes())
        for version, first, end in generation.versions:
            append_span(self._spans, VersionSpan(version, start + first, start + end))
        self._logprobs.append(generation.logprobs)
        self._sampled.append(torch.ones(count, dtype=torch.bool))
        for name, column in self._optional.items():
            rows = getattr(generation, name)
            if rows is None:
                raise ValueError(
                    f"a generation of {count} tokens without the {column.column.title} that were asked for"
                )
            column.append(rows)

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Take tokens that nobody sampled. Their routes come with the next sampled tokens: a server reads them then."""
        self.tokens.extend(token_ids)
        for column in self._columns():
            column.append_fill(len(token_ids))

    def completion(self, reason: FinishReason, tokenizer: Any) -> Completion:
        """The response as it is now.

        Raises:
            ValueError: none of its tokens was sampled.
        """
        if not self._spans:
            raise ValueError(f"a response of {len(self.tokens)} tokens, none of them sampled")
        optional: dict[str, Any] = {name: c.complete(len(self.tokens)) for name, c in self._optional.items()}
        sampled = self._sampled.tensor
        return Completion(
            token_ids=self._token_ids(),
            logprobs=self._logprobs.tensor,
            finish_reason=reason,
            policy_version=max(span.policy_version for span in self._spans),
            text=tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True),
            policy_versions=tuple(self._spans),
            loss_mask=None if bool(sampled.all()) else sampled,
            **optional,
        )

    def _columns(self) -> list[GrowingColumn]:
        return [self._logprobs, self._sampled, *self._optional.values()]

    def _token_ids(self) -> Tensor:
        """[R] int32, a copy in host memory."""
        return torch.from_numpy(np.frombuffer(self.tokens, dtype=np.int32).copy())

    def _known_routes(self) -> int:
        """Positions of prompt and response whose routes are known."""
        return len(self._optional["routed_experts"].rows) if self._routing is not None else 0
