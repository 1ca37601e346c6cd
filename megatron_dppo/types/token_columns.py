"""Every field with one row per token, declared once.

``TOKEN_COLUMNS`` is the table: each column with its names, dtype, alignment and fill. ``types.columns.TokenColumn``
says what an entry means, and how a column is cut, joined, packed, sent and recorded. Code that does so loops over the
table, so a new column is one entry here and one field in the records that hold it. What its declaration cannot know
stays with the engines (how it is read) and with the loss (what it is for); docs/extending.md lists the files.

A checkpoint of unfinished groups holds the response's fields as they are (``rollout.store``). Which weights sampled
which tokens is not a column: its spans cover runs of tokens, see ``cut_spans`` and ``append_span``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types.columns import Alignment, KeptSetsColumn, RoutesColumn, TokenColumn, TokenRows
from megatron_dppo.types.rollouts import MISSING_EXPERT, SamplingParams, VersionSpan

TOKEN_IDS = TokenColumn(
    response="token_ids",
    record="response_ids",
    dtype=torch.int32,
    alignment=Alignment.RESPONSE,
    fill=0,
)
LOGPROBS = TokenColumn(
    response="logprobs",
    name="rollout_logprobs",
    record="rollout_logprobs",
    dtype=torch.float32,
    alignment=Alignment.LABELS,
    fill=0.0,
)
SAMPLED = TokenColumn(
    response="loss_mask",
    name="loss_mask",
    record="sampled",
    dtype=torch.bool,
    alignment=Alignment.LABELS,
    fill=False,
    is_optional=False,
)


def _slots(params: SamplingParams) -> tuple[int, ...] | None:
    return (params.topk_logprobs + 1,) if params.topk_logprobs else None


TOPK_IDS = TokenColumn(
    response="topk_token_ids",
    name="rollout_topk_ids",
    record="topk_ids",
    dtype=torch.int32,
    row=("K+1",),
    alignment=Alignment.RESPONSE,
    fill=-1,
    asked=_slots,
    is_loss_only=True,
)
TOPK_LOGPROBS = TokenColumn(
    response="topk_logprobs",
    name="rollout_topk_logprobs",
    record="topk_logprobs",
    dtype=torch.float32,
    row=("K+1",),
    alignment=Alignment.RESPONSE,
    fill=0.0,
    asked=_slots,
    is_loss_only=True,
)
KEPT = KeptSetsColumn(
    response="kept",
    name="kept",
    record="kept",
    dtype=torch.int32,
    alignment=Alignment.RESPONSE,
    fill=0,
    asked=lambda params: () if params.kept_sets else None,
    is_loss_only=True,
)
ROUTES = RoutesColumn(
    response="routed_experts",
    name="routed_experts",
    record="routes",
    dtype=None,
    row=("L", "k"),
    alignment=Alignment.INPUTS,
    fill=MISSING_EXPERT,
)

TOKEN_COLUMNS: list[TokenColumn] = [
    TOKEN_IDS,
    LOGPROBS,
    SAMPLED,
    TOPK_IDS,
    TOPK_LOGPROBS,
    KEPT,
    ROUTES,
    # The trainer makes the others.
    TokenColumn(name="tokens", dtype=torch.int64, alignment=Alignment.LABELS, fill=0, is_optional=False),
    TokenColumn(name="labels", dtype=torch.int64, alignment=Alignment.LABELS, fill=0, is_optional=False),
    TokenColumn(name="advantages", dtype=torch.float32, alignment=Alignment.LABELS, fill=0.0, is_optional=False),
    TokenColumn(name="anchor_logprobs", dtype=torch.float32, alignment=Alignment.LABELS, fill=0.0),
    TokenColumn(name="reference_logprobs", dtype=torch.float32, alignment=Alignment.LABELS, fill=0.0),
    TokenColumn(name="teacher_logprobs", dtype=torch.float32, alignment=Alignment.LABELS, fill=0.0, is_packed=False),
]
"""All of them, in the order of the Parquet files."""


def asked_columns(params: SamplingParams) -> dict[str, tuple[int, ...]]:
    """Return the shape of a row of each column that ``params`` ask for, by the response's name."""
    shapes = {c.response: c.asked(params) for c in TOKEN_COLUMNS if c.asked is not None and c.response is not None}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def carried_columns(response: Any, start: int = 0) -> dict[str, TokenRows]:
    """Return the columns of a response that a training sample takes as they are, by their name there.

    ``start`` is the first token that counts as response; the model reads the ones before it all the same.
    """
    columns = [(c, getattr(response, c.response)) for c in TOKEN_COLUMNS if c.is_carried and c.response is not None]
    return {
        str(column.name): rows if column.alignment == Alignment.INPUTS else rows[start:]
        for column, rows in columns
        if rows is not None
    }


def response_to_tensors(record: Any) -> dict[str, Tensor]:
    """Return all tensors of a generation's columns by name, to be sent to another process."""
    columns = [(c, getattr(record, c.response, None)) for c in TOKEN_COLUMNS if c.response is not None]
    return {
        name: tensor for column, rows in columns if rows is not None for name, tensor in column.to_tensors(rows).items()
    }


def response_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the columns of ``response_to_tensors`` by their field of a generation."""
    columns = {c.response: c.from_tensors(tensors) for c in TOKEN_COLUMNS if c.response is not None}
    return {name: rows for name, rows in columns.items() if rows is not None}


def response_to_record(completion: Any) -> dict[str, Any]:
    """Return the values of a completion's columns by the columns of a recorded step."""
    values: dict[str, Any] = {}
    for column in _recorded():
        values |= column.to_record(getattr(completion, str(column.response)))
    return values


def response_from_record(row: Mapping[str, Any], response_tokens: int) -> dict[str, Any]:
    """Return the columns of ``response_to_record`` by their field of a completion."""
    return {str(column.response): column.from_record(row, response_tokens) for column in _recorded()}


def record_types() -> dict[str, str]:
    """Return the Parquet columns of all token columns and their types, see ``TokenColumn.record_types``."""
    return {name: kind for column in _recorded() for name, kind in column.record_types().items()}


def _recorded() -> list[TokenColumn]:
    return [c for c in TOKEN_COLUMNS if c.record is not None and c.response is not None]


class GrowingColumn:
    """One column of a response that grows by parts. Parts are joined when they are read; none is ever changed.

    Args:
        column: its declaration.
        empty: no rows, with dtype and row shape of what will come.
        prompt_tokens: P, for columns that begin with the prompt.
    """

    def __init__(self, column: TokenColumn, empty: TokenRows, prompt_tokens: int) -> None:
        self.column = column
        self._empty = empty
        self._prompt_tokens = prompt_tokens
        self._parts: list[TokenRows] = []

    @property
    def rows(self) -> TokenRows:
        """All rows so far."""
        if not self._parts:
            return self._empty
        self._parts = [self.column.join(self._parts)]
        return self._parts[0]

    def fits(self, rows: TokenRows | None) -> bool:
        """Whether ``rows`` can be appended."""
        return rows is not None and self.column.form(rows) == self.column.form(self._empty)

    @property
    def tensor(self) -> Tensor:
        """The rows of a column of numbers."""
        rows = self.rows
        assert isinstance(rows, Tensor)
        return rows

    def fresh(self) -> GrowingColumn:
        """Return an empty one of the same form."""
        return GrowingColumn(self.column, self._empty, self._prompt_tokens)

    def append(self, rows: TokenRows) -> None:
        """Append the rows of new tokens.

        Raises:
            ValueError: another dtype or shape of a row.
        """
        if not self.fits(rows):
            found, expected = self.column.form(rows), self.column.form(self._empty)
            raise ValueError(f"{self.column.title} of {expected} cannot go on with {found}")
        self._parts.append(rows)

    def replace(self, rows: TokenRows) -> None:
        """Take ``rows`` in place of all that there is."""
        self._parts = []
        self.append(rows)

    def append_fill(self, count: int) -> None:
        """Append tokens that nobody sampled. What the model reads of them comes with the next sampled tokens."""
        if self.column.alignment != Alignment.INPUTS:
            self._parts.append(self.column.filled(count, self._empty))

    def cut(self, response_tokens: int) -> None:
        """Forget what comes after the first tokens of the response."""
        # The last token that is left may go on differently: nobody has read it yet.
        self._parts = [self.rows[: self.column.num_rows(self._prompt_tokens, response_tokens)]]

    def complete(self, response_tokens: int) -> TokenRows:
        """Return the rows of a finished response; those of unread tokens at its end are fill."""
        missing = self.column.num_rows(self._prompt_tokens, response_tokens) - len(self.rows)
        if missing <= 0:
            return self.rows
        return self.column.join([self.rows, self.column.filled(missing, self._empty)])


def cut_spans(spans: Sequence[VersionSpan], length: int) -> list[VersionSpan]:
    """Return the spans of the first ``length`` tokens."""
    return [span._replace(end=min(span.end, length)) for span in spans if span.start < length]


def append_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span; one that goes on with the last version extends that span."""
    last = spans[-1] if spans else None
    if last is not None and (last.policy_version, last.end) == (span.policy_version, span.start):
        spans[-1] = last._replace(end=span.end)
    else:
        spans.append(span)
