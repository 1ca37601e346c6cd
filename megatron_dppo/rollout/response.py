"""A response that grows in parts: sampled by one or several weight versions, interrupted, or added by a tool."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo.types import Completion, FinishReason, ResponseColumns, RoutingShape, SamplingParams, VersionSpan
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo.types.token_columns import (
    LOGPROBS,
    ROUTES,
    SAMPLED,
    TOKEN_COLUMNS,
    Alignment,
    TokenColumn,
    TokenRows,
)
from megatron_dppo_engines.route_checks import missing_rows
from megatron_dppo_engines.server import GenerateRequest, Generation


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResponse(ResponseColumns):
    """An incomplete response: R tokens so far to a prompt of P tokens, with routes of fewer than P + R positions."""

    token_ids: Tensor
    """Response tokens so far. Shape [R], int32."""
    logprobs: Tensor
    """Log-probabilities under the sampling policy, 0.0 at tokens that were not sampled. Shape [R], float32."""
    sampled: Tensor
    """True at sampled tokens, False at tokens that a tool added. Shape [R], bool."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens."""
    turn_ends: tuple[tuple[int, FinishReason], ...] = ()
    """(end, finish reason) of each turn of a user's function; the last turn may have none yet."""
    parts: int = 0
    """Number of requests so far."""
    num_after_stop: int = 0
    """Number of sampled tokens that were dropped behind a stop string."""
    num_not_repeated: int = 0
    """Number of sampled tokens that were dropped because the user's function, run again, behaved differently."""
    branches: tuple[PartialResponse, ...] = ()
    """Further sequences of an agent's episode, in the order in which they began."""


@dataclass(eq=False)
class GrowingColumn:
    """One column of a response that grows in parts. Parts are joined on access; none is ever changed."""

    column: TokenColumn
    empty: TokenRows
    """No rows, but dtype and row shape of the column."""
    prompt_tokens: int
    _parts: list[TokenRows] = field(default_factory=list, init=False)

    @property
    def rows(self) -> TokenRows:
        """All rows so far."""
        if not self._parts:
            return self.empty
        # Joined on access only: a response of many turns would otherwise copy all of its rows at each turn.
        self._parts = [self.column.join(self._parts)]
        return self._parts[0]

    def fits(self, rows: TokenRows | None) -> bool:
        """Return True if ``rows`` can be appended."""
        return rows is not None and self.column.form(rows) == self.column.form(self.empty)

    @property
    def tensor(self) -> Tensor:
        """The rows of a column that holds a tensor."""
        rows = self.rows
        assert isinstance(rows, Tensor)
        return rows

    def fresh(self) -> GrowingColumn:
        """Return an empty column of the same form."""
        return GrowingColumn(self.column, self.empty, self.prompt_tokens)

    def append(self, rows: TokenRows) -> None:
        """Append the rows of new tokens."""
        if not self.fits(rows):
            expected = self.column.form(self.empty)
            raise ValueError(f"Expected {self.column.title} of form {expected}, got {self.column.form(rows)}.")
        self._parts.append(rows)

    def replace(self, rows: TokenRows) -> None:
        """Replace all rows by ``rows``."""
        self._parts = []
        self.append(rows)

    def append_fill(self, count: int) -> None:
        """Append fill for tokens that were not sampled.

        Columns of the model's inputs get these rows with the next sampled tokens, when the model reads them.
        """
        if self.column.alignment != Alignment.INPUTS:
            self._parts.append(self.column.filled(count, self.empty))

    def cut(self, response_tokens: int) -> None:
        """Remove all rows after the first tokens of the response."""
        # ``num_rows`` excludes the last remaining token of an input column: the model has not read it yet.
        self._parts = [self.rows[: self.column.num_rows(self.prompt_tokens, response_tokens)]]

    def complete(self, response_tokens: int) -> TokenRows:
        """Return the rows of a finished response, with fill for unread tokens at its end."""
        missing = self.column.num_rows(self.prompt_tokens, response_tokens) - len(self.rows)
        if missing <= 0:
            return self.rows
        return self.column.join([self.rows, self.column.filled(missing, self.empty)])


def append_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span. If it continues the last span with the same version and server, extend that span."""
    last = spans[-1] if spans else None
    if last is not None and last._replace(start=span.start, end=span.end) == span and last.end == span.start:
        spans[-1] = last._replace(end=span.end)
    else:
        spans.append(span)


class GrowingResponse:
    """The response to one prompt so far; appended tokens never change. ``columns``: shapes of recorded columns."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        routing: RoutingShape | None = None,
        columns: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self._routing = routing
        # Grows in place, at 4 bytes a token.
        self.tokens = array("i")
        self._spans: list[VersionSpan] = []
        self._logprobs = GrowingColumn(LOGPROBS, LOGPROBS.empty(()), len(self.prompt))
        self._sampled = GrowingColumn(SAMPLED, SAMPLED.empty(()), len(self.prompt))
        shapes = columns or {}
        self._optional = {
            c.response: GrowingColumn(c, c.empty(shapes[c.response]), len(self.prompt))
            for c in TOKEN_COLUMNS
            if c.response is not None and c.response in shapes
        }
        if routing is not None:
            self._optional["routed_experts"] = GrowingColumn(ROUTES, missing_rows(0, routing), len(self.prompt))
        self.turn_ends: list[tuple[int, FinishReason]] = []
        """(end, finish reason) of each turn, see ``PartialResponse.turn_ends``."""
        self.parts = 0
        """Number of generations that were appended."""
        self.num_after_stop = 0
        """See ``PartialResponse.num_after_stop``."""
        self.num_not_repeated = 0
        """See ``PartialResponse.num_not_repeated``."""
        self.branches: list[GrowingResponse] = []
        """Further sequences, which an agent began with other tokens. They have no branches themselves."""
        self.number = 0
        """Index among the sequences of the response; 0 is the one that has the branches."""

    @property
    def seed_key(self) -> str:
        """Key of the next request's seed, which no other request of the response has."""
        return f"{self.parts}/{self.number}" if self.number else f"{self.parts}"

    def add_branch(self) -> GrowingResponse:
        """Add and return an empty sequence with the same recorded columns."""
        branch = GrowingResponse(self.prompt, routing=self._routing)
        branch._optional = {name: column.fresh() for name, column in self._optional.items()}
        self.branches.append(branch)
        branch.number = len(self.branches)
        return branch

    def state(self) -> PartialResponse:
        """Return a snapshot that ``restore`` accepts."""
        optional: dict[str, Any] = {name: column.rows for name, column in self._optional.items()}
        return PartialResponse(
            token_ids=self._token_ids(),
            logprobs=self._logprobs.tensor,
            sampled=self._sampled.tensor,
            versions=tuple(self._spans),
            turn_ends=tuple(self.turn_ends),
            parts=self.parts,
            num_after_stop=self.num_after_stop,
            num_not_repeated=self.num_not_repeated,
            branches=tuple(branch.state() for branch in self.branches),
            **optional,
        )

    def restore(self, state: PartialResponse) -> None:
        """Continue from a snapshot of a response to the same prompt."""
        columns = {name: getattr(state, name) for name in self._optional}
        missing = [column.column.title for name, column in self._optional.items() if not column.fits(columns[name])]
        # A snapshot without tokens may come from a request that recorded other columns: nothing is lost.
        if len(state.token_ids) and missing:
            raise ValueError(
                f"a response of {len(state.token_ids)} tokens without the Top-K, routes or sampling masks of this run; "
                f"it lacks {', '.join(missing)}"
            )
        self.tokens = array("i", state.token_ids.numpy().tobytes())
        self._spans = list(state.versions)
        self.turn_ends = list(state.turn_ends)
        self.parts = state.parts
        self.num_after_stop = state.num_after_stop
        self.num_not_repeated = state.num_not_repeated
        self._logprobs.replace(state.logprobs)
        self._sampled.replace(state.sampled)
        for name, column in self._optional.items():
            if column.fits(columns[name]):
                column.replace(columns[name])
        for branch_state in state.branches:
            self.add_branch().restore(branch_state)

    def truncate(self, length: int) -> None:
        """Drop everything after the first ``length`` tokens."""
        if length >= len(self.tokens):
            return
        del self.tokens[length:]
        self._spans = [span._replace(end=min(span.end, length)) for span in self._spans if span.start < length]
        for column in self._columns():
            column.cut(length)
        self.turn_ends = [(end, reason) for end, reason in self.turn_ends if end <= length]

    @property
    def lacks_routes(self) -> bool:
        """True if routes are recorded and there are none yet."""
        return self._routing is not None and not self._num_routes()

    def starts_with_given(self, token_ids: Sequence[int]) -> bool:
        """Return True if exactly the tokens before the first sampled one are ``token_ids``."""
        count = len(token_ids)
        if self.tokens[:count].tolist() != list(token_ids) or self.has_sampled_tokens(0, count):
            return False
        return len(self.tokens) == count or self.is_fully_sampled(count, count + 1)

    def logprobs(self, start: int, end: int) -> tuple[float, ...]:
        """Return the log-probabilities of the tokens from ``start`` to ``end``."""
        return tuple(self._logprobs.tensor[start:end].tolist())

    def num_sampled_tokens(self, start: int) -> int:
        """Return the number of sampled tokens from ``start`` on."""
        return int(self._sampled.tensor[start:].sum())

    def has_sampled_tokens(self, start: int, end: int) -> bool:
        """Return True if any of the tokens from ``start`` to ``end`` was sampled."""
        return bool(self._sampled.tensor[start:end].any())

    def is_fully_sampled(self, start: int, end: int) -> bool:
        """Return True if all tokens from ``start`` to ``end`` were sampled."""
        return bool(self._sampled.tensor[start:end].all())

    def next_request(
        self,
        request_id: str,
        params: SamplingParams,
        stop_token_ids: tuple[int, ...],
        limit: int,
        *,
        prompt_routes: bool = True,
    ) -> GenerateRequest:
        """Return the request that continues this response, with at most ``limit`` new tokens.

        Without ``prompt_routes`` the routes of the prompt's tokens are not requested, but for its last one: the model
        reads that anew for each response.
        """
        num_routes = self._num_routes()
        return GenerateRequest(
            request_id=request_id,
            token_ids=(*self.prompt, *self.tokens),
            params=replace(params, max_new_tokens=limit),
            stop_token_ids=stop_token_ids,
            routing=self._routing,
            routing_start=num_routes if num_routes or prompt_routes else len(self.prompt) - 1,
        )

    def append_sampled(self, generation: Generation) -> None:
        """Append a server's response to ``next_request``."""
        count = len(generation.token_ids)
        # Counted without a token too, because the seed of the next request depends on it.
        self.parts += 1
        if not count:
            return
        start = len(self.tokens)
        self.tokens.frombytes(generation.token_ids.numpy().tobytes())
        for span in generation.versions:
            append_span(self._spans, span._replace(start=start + span.start, end=start + span.end))
        self._logprobs.append(generation.logprobs)
        self._sampled.append(torch.ones(count, dtype=torch.bool))
        for name, column in self._optional.items():
            rows = getattr(generation, name)
            if rows is None:
                raise ValueError(
                    f"a generation of {count} tokens without the {column.column.title} that were asked for"
                )
            column.append(rows)

    def append_unsampled(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a tool's output.

        Their routes arrive with the next sampled tokens, since the server reads them then.
        """
        self.tokens.extend(token_ids)
        for column in self._columns():
            column.append_fill(len(token_ids))

    def completion(self, reason: FinishReason, tokenizer: Tokenizer) -> Completion:
        """Return the response as a completion."""
        if not self._spans:
            raise ValueError(f"a response of {len(self.tokens)} tokens, none of them sampled")
        optional: dict[str, Any] = {name: c.complete(len(self.tokens)) for name, c in self._optional.items()}
        sampled = self._sampled.tensor
        return Completion(
            token_ids=self._token_ids(),
            logprobs=self._logprobs.tensor,
            finish_reason=reason,
            # The newest version; ``policy_versions`` below has all of them.
            policy_version=max(span.policy_version for span in self._spans),
            text=decode_response(tokenizer, self.tokens.tolist()),
            policy_versions=tuple(self._spans),
            loss_mask=None if bool(sampled.all()) else sampled,
            **optional,
        )

    def _columns(self) -> list[GrowingColumn]:
        return [self._logprobs, self._sampled, *self._optional.values()]

    def _token_ids(self) -> Tensor:
        """Return a copy of the tokens in host memory. Shape [R], int32."""
        return torch.from_numpy(np.frombuffer(self.tokens, dtype=np.int32).copy())

    def _num_routes(self) -> int:
        """Return the number of positions of prompt and response whose routes are known."""
        return len(self._optional["routed_experts"].rows) if self._routing is not None else 0
