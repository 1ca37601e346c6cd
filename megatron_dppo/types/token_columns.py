"""Every field with one row per token, declared once.

``TOKEN_COLUMNS`` is the table: each column with its names, dtype, alignment and fill. ``TokenColumn`` defines what an
entry means and how a column is cut, joined, packed, sent and recorded. All such code loops over the table, so a new
column is one entry here and one field in the records that hold it. Only engines (reading it) and losses (using it) need
more: docs/extending.md lists the files, and a test adds a column to them.

A checkpoint of unfinished groups stores the response's fields directly (``rollout.store``). The policy version of each
token is not a column, because its spans cover runs of tokens (``VersionSpan``).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_dppo_engines.responses import COLUMN_LIMITS, SamplingMask, SamplingParams, check_sampling_mask
from megatron_dppo_engines.routes import MISSING_EXPERT

TokenRows = Tensor | SamplingMask
"""Values of a column, one row per token. ``len``, slices and ``to`` work on both forms."""


class Alignment(StrEnum):
    """Tokens that the rows of a column belong to. P prompt tokens, R response tokens."""

    RESPONSE = "response"
    """Response tokens, R rows. A training sample holds the same rows; ``pack`` puts them at the sample's end."""
    INPUTS = "inputs"
    """Tokens that the model reads: all of the sequence but the last. P + R - 1 rows."""
    LABELS = "labels"
    """[P + R - 1] the labels of a training sample. A response has [R]; ``data.training_samples`` shifts them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumn:
    """Declaration of one column whose rows are numbers, or arrays of equal shape.

    It has up to three names, because three kinds of records hold it:

    - ``response``: in ``Generation``, ``PartialResponse`` and ``Completion``, one row per response token;
    - ``name``: in ``TrainingSample``, ``MicroBatch`` and ``TokenTargets``, aligned to the labels;
    - ``record``: in the Parquet file of a recorded step.
    """

    response: str | None = None
    """Field of a response. None: the trainer computes the column."""
    name: str | None = None
    """Field of a training sample and of packed rows. None: training does not read the column."""
    record: str | None = None
    """Column of a recorded step. None: not recorded."""
    dtype: torch.dtype | None = torch.float32
    """Dtype of the rows. None: the dtype of the model's ``RoutingShape``."""
    row: tuple[str, ...] = ()
    """Dimensions of one token's row, for error messages. Empty for a plain number."""
    alignment: Alignment = Alignment.LABELS
    """Tokens that the rows belong to."""
    fill: float | Mapping[torch.dtype, int] = 0
    """Value on padding and on tokens that were not sampled; a mapping if it depends on the dtype."""
    requested_row_shape: Callable[[SamplingParams], tuple[int, ...] | None] | None = None
    """Function that returns the shape of a row if the parameters request the column, else None. Without a function the
    column is always present, or requested by other means (routes)."""
    is_optional: bool = True
    """True if training samples may lack it."""
    is_packed: bool = True
    """True if packed rows have it. False: it is used before samples are packed."""
    is_loss_only: bool = False
    """True if only the rank that computes the loss reads it. Other pipeline stages do not receive it."""

    @property
    def title(self) -> str:
        """Name in error messages."""
        return self.name or self.response or ""

    @cached_property
    def is_carried(self) -> bool:
        """True if a training sample holds the response's rows unchanged, without a shift or a mask."""
        return self.response is not None and self.name is not None and self.alignment != Alignment.LABELS

    # Requests.

    @property
    def is_on_request(self) -> bool:
        """True if ``SamplingParams.columns`` requests the column by its name in a response, because a loss reads it."""
        return self.response in COLUMN_LIMITS

    def requested_shape(self, params: SamplingParams) -> tuple[int, ...] | None:
        """Return the shape of a row if ``params`` request the column, else None."""
        if self.is_on_request:
            return () if self.response in params.columns else None
        return None if self.requested_row_shape is None else self.requested_row_shape(params)

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` correct values of a column on request, for a check before a run."""
        assert self.response is not None
        lowest, highest = COLUMN_LIMITS[self.response]
        low = max(lowest, min(0.0, highest) - 1)
        high = min(highest, low + 1)
        return low + (high - low) * torch.rand(count, generator=generator)

    # Rows of one response.

    def new(self, *shape: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of ``shape`` that holds the fill value."""
        dtype = dtype or self.dtype
        assert dtype is not None, f"{self.title} has the dtype of its model. Fix: pass dtype."
        return torch.full(shape, self.fill_value(dtype), dtype=dtype, device=device)

    def fill_value(self, dtype: torch.dtype) -> float:
        """Return the fill value for a dtype."""
        return self.fill[dtype] if isinstance(self.fill, Mapping) else self.fill

    def empty(self, row_shape: tuple[int, ...]) -> TokenRows:
        """Return a column of 0 rows of ``row_shape``."""
        return self.new(0, *row_shape)

    def filled(self, count: int, like: TokenRows) -> TokenRows:
        """Return ``count`` rows of fill, of the shape and dtype of ``like``."""
        assert isinstance(like, Tensor)
        return self.new(count, *like.shape[1:], dtype=like.dtype)

    def join(self, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts, one after the other; a single part is not copied."""
        return parts[0] if len(parts) == 1 else torch.cat([part for part in parts if isinstance(part, Tensor)])

    def num_rows(self, prompt_tokens: int, response_tokens: int) -> int:
        """Return the number of rows of a response, and of its part of a training sample."""
        if self.alignment == Alignment.INPUTS:
            # The model does not read the last token: nothing follows it.
            return max(0, prompt_tokens + response_tokens - 1)
        return response_tokens

    def check(self, rows: TokenRows, prompt_tokens: int, response_tokens: int) -> None:
        """Check the number of rows and their dimensions."""
        assert isinstance(rows, Tensor)
        count = self.num_rows(prompt_tokens, response_tokens)
        if self.alignment == Alignment.INPUTS and len(rows) != count:
            raise ValueError(
                f"{self.title} of {len(rows)} tokens for a sequence of {prompt_tokens} prompt and {response_tokens} "
                f"response tokens; expected {count} rows, one for each token but the last"
            )
        if rows.dim() != 1 + len(self.row) or len(rows) != count:
            expected = ", ".join([str(count), *self.row])
            raise ValueError(
                f"{self.title} of shape {list(rows.shape)}; expected [{expected}], one row for each response token"
            )

    # Packed rows.

    def form(self, rows: TokenRows | None) -> object:
        """Return the form that all samples of one packed row must share. None: the column is missing."""
        # Samples with another K, or with routes of another dtype, cannot share a packed row.
        return (rows.dtype, rows.shape[1:]) if isinstance(rows, Tensor) else None

    def pack(self, parts: Sequence[TokenRows], ends: Sequence[int], size: int, like: TokenRows) -> TokenRows:
        """Pack parts into ``size`` rows: each part ends before its position in ``ends``, the other rows are fill.

        ``like`` has the dtype and the row shape, for a packed row without samples.
        """
        assert isinstance(like, Tensor)
        if sum(part.shape[0] for part in parts if isinstance(part, Tensor)) == size:
            # Without gaps, which is usual, a single copy does it.
            return torch.cat([part for part in parts if isinstance(part, Tensor)]).to(like.dtype)
        packed = like.new_full((size, *like.shape[1:]), self.fill_value(like.dtype))
        for part, end in zip(parts, ends, strict=True):
            assert isinstance(part, Tensor)
            # Aligned at the end: R response rows fill the last R positions of their sequence, P + R - 1 rows fill all
            # of it.
            packed[end - len(part) : end] = part
        return packed

    # Transfer between processes.

    def to_tensors(self, rows: TokenRows) -> dict[str, Tensor]:
        """Return the tensors that represent the column, by name."""
        assert isinstance(rows, Tensor) and self.response is not None
        return {self.response: rows}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> TokenRows | None:
        """Return the column from the result of ``to_tensors``. None if it was not sent."""
        return None if self.response is None else tensors.get(self.response)

    # Recorded steps.

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns and their types: ``bytes``, ``text``, or a list's, such as ``int32s``."""
        assert self.record is not None
        kinds = {torch.int32: "int32s", torch.float32: "float32s", torch.bool: "bools"}
        return {self.record: kinds[self.new(0).dtype]}

    def to_record(self, rows: TokenRows | None) -> dict[str, object]:
        """Return the values of one sample by Parquet column; lists are flat arrays."""
        assert self.record is not None
        return {self.record: rows.flatten().numpy() if isinstance(rows, Tensor) else None}

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the column from the result of ``to_record``. None: the sample has none, or the file is older."""
        assert self.record is not None
        values = row.get(self.record)
        if values is None:
            return None
        flat = torch.tensor(values, dtype=self.dtype)
        # Lists in Parquet are flat. K + 1 is not recorded: it follows from the length.
        return flat.view(response_tokens, -1) if self.row else flat


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingMaskColumn(TokenColumn):
    """A column of ``SamplingMask``: each token has as many ids as its sampling filters allow."""

    @property
    def _tensor_names(self) -> tuple[str, str]:
        return f"{self.response}_ids", f"{self.response}_counts"

    @property
    def _record_names(self) -> tuple[str, str]:
        return f"{self.record}_ids", f"{self.record}_counts"

    def empty(self, row_shape: tuple[int, ...]) -> TokenRows:
        """Return the masks of 0 tokens."""
        return SamplingMask.none(0)

    def filled(self, count: int, like: TokenRows) -> TokenRows:
        """Return ``count`` tokens without a mask."""
        return SamplingMask.none(count)

    def join(self, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the masks of all parts, one after the other."""
        masks = [part for part in parts if isinstance(part, SamplingMask)]
        return masks[0] if len(masks) == 1 else SamplingMask.cat(masks)

    def check(self, rows: TokenRows, prompt_tokens: int, response_tokens: int) -> None:
        """Check ids and counts, see ``check_sampling_mask``."""
        assert isinstance(rows, SamplingMask)
        check_sampling_mask(rows, response_tokens)

    def form(self, rows: TokenRows | None) -> object:
        """Return the form that all samples of one packed row must share. None: the column is missing."""
        return None if rows is None else SamplingMask

    def pack(self, parts: Sequence[TokenRows], ends: Sequence[int], size: int, like: TokenRows) -> TokenRows:
        """Pack the masks of all parts into ``size`` tokens; tokens between the parts have none."""
        packed = SamplingMask.none(size)
        # Ids have no gaps: a token between the parts is a count of 0. The empty tensor is for a row without samples.
        ids = [packed.ids]
        for part, end in zip(parts, ends, strict=True):
            assert isinstance(part, SamplingMask)
            packed.counts[end - len(part) : end] = part.counts
            ids.append(part.ids)
        return SamplingMask(torch.cat(ids), packed.counts)

    def to_tensors(self, rows: TokenRows) -> dict[str, Tensor]:
        """Return ids and counts."""
        assert isinstance(rows, SamplingMask)
        return dict(zip(self._tensor_names, (rows.ids, rows.counts), strict=True))

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> TokenRows | None:
        """Return the masks from ids and counts. None if they were not sent."""
        ids, counts = map(tensors.get, self._tensor_names)
        return None if ids is None or counts is None else SamplingMask(ids, counts)

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns of ids and counts."""
        return dict.fromkeys(self._record_names, "int32s")

    def to_record(self, rows: TokenRows | None) -> dict[str, object]:
        """Return ids and counts of one sample."""
        if rows is None:
            return dict.fromkeys(self._record_names)
        assert isinstance(rows, SamplingMask)
        return dict(zip(self._record_names, (rows.ids.numpy(), rows.counts.numpy()), strict=True))

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the masks from the result of ``to_record``."""
        ids, counts = map(row.get, self._record_names)
        if ids is None or counts is None:
            return None
        return SamplingMask(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutesColumn(TokenColumn):
    """The experts of each token and layer. Recorded as bytes, because no list type of Parquet is as small."""

    @property
    def _parts(self) -> tuple[str, str, str]:
        return f"{self.record}", f"{self.record}_shape", f"{self.record}_dtype"

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns of bytes, shape and dtype."""
        return dict(zip(self._parts, ("bytes", "int32s", "text"), strict=True))

    def to_record(self, rows: TokenRows | None) -> dict[str, object]:
        """Return bytes, shape and dtype of one sample."""
        if not isinstance(rows, Tensor):
            return dict.fromkeys(self._parts)
        values = (rows.contiguous().numpy().tobytes(), list(rows.shape), str(rows.dtype).removeprefix("torch."))
        return dict(zip(self._parts, values, strict=True))

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the routes from the result of ``to_record``."""
        content, shape, dtype = (row.get(name) for name in self._parts)
        if content is None or shape is None or dtype is None:
            return None
        # A bytearray, because torch warns about memory that it may not write, such as ``bytes``.
        return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(*shape)


TOKEN_IDS = TokenColumn(response="token_ids", record="response_ids", dtype=torch.int32, alignment=Alignment.RESPONSE)
LOGPROBS = TokenColumn(response="logprobs", name="rollout_logprobs", record="rollout_logprobs")
SAMPLED = TokenColumn(
    response="loss_mask",
    name="loss_mask",
    record="sampled",
    dtype=torch.bool,
    fill=False,
    is_optional=False,
)


def _slots(params: SamplingParams) -> tuple[int, ...] | None:
    # The last slot is for a sampled token outside the Top-K.
    return (params.topk_logprobs + 1,) if params.topk_logprobs else None


TOPK_IDS = TokenColumn(
    response="topk_token_ids",
    name="rollout_topk_ids",
    record="topk_ids",
    dtype=torch.int32,
    row=("K+1",),
    alignment=Alignment.RESPONSE,
    fill=-1,
    requested_row_shape=_slots,
    is_loss_only=True,
)
TOPK_LOGPROBS = TokenColumn(
    response="topk_logprobs",
    name="rollout_topk_logprobs",
    record="topk_logprobs",
    row=("K+1",),
    alignment=Alignment.RESPONSE,
    requested_row_shape=_slots,
    is_loss_only=True,
)
SAMPLING_MASK = SamplingMaskColumn(
    response="sampling_mask",
    name="sampling_mask",
    record="kept",
    dtype=torch.int32,
    alignment=Alignment.RESPONSE,
    # An empty shape: the row of a token is one set of ids, however many.
    requested_row_shape=lambda params: () if params.return_sampling_mask else None,
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
PAST_REWARDS = TokenColumn(response="past_rewards", record="past_rewards")
TOKEN_COLUMNS: list[TokenColumn] = [
    TOKEN_IDS,
    LOGPROBS,
    SAMPLED,
    PAST_REWARDS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    SAMPLING_MASK,
    ROUTES,
    # The trainer computes the columns below.
    TokenColumn(name="tokens", dtype=torch.int64, is_optional=False),
    TokenColumn(name="labels", dtype=torch.int64, is_optional=False),
    TokenColumn(name="advantages", is_optional=False),
    TokenColumn(name="recomputed_logprobs"),
    TokenColumn(name="reference_logprobs"),
    TokenColumn(name="ages"),
    # The advantages contain the teacher's part before samples are packed.
    TokenColumn(name="teacher_logprobs", is_packed=False),
]
"""All columns, in the order of the Parquet files."""


def requested_columns(params: SamplingParams) -> dict[str, tuple[int, ...]]:
    """Return the row shape of each column that ``params`` request, by its field of a response."""
    shapes = {c.response: c.requested_shape(params) for c in TOKEN_COLUMNS if c.response is not None}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def columns_on_request(names: Collection[str] | None = None) -> dict[str, TokenColumn]:
    """Return the columns that a request names, by their field of a response.

    ``names`` leaves those whose field of a training sample is among them, such as ``required_inputs`` of a loss.
    """
    columns = [c for c in TOKEN_COLUMNS if c.is_on_request and c.response is not None]
    return {str(c.response): c for c in columns if names is None or c.name in names}


def carried_columns(response: object, start: int = 0) -> dict[str, TokenRows]:
    """Return the columns of a response that a training sample holds unchanged, by their field of a sample.

    ``start`` is the first token that counts as response. The model also reads the tokens before it.
    """
    columns = [(c, getattr(response, c.response)) for c in TOKEN_COLUMNS if c.is_carried and c.response is not None]
    return {
        # Routes belong to input tokens, of which the model reads those before ``start`` too.
        str(column.name): rows if column.alignment == Alignment.INPUTS else rows[start:]
        for column, rows in columns
        if rows is not None
    }


def response_to_tensors(record: object) -> dict[str, Tensor]:
    """Return the tensors of all columns of a generation by name, to send them to another process."""
    columns = [(c, getattr(record, c.response, None)) for c in TOKEN_COLUMNS if c.response is not None]
    return {
        name: tensor for column, rows in columns if rows is not None for name, tensor in column.to_tensors(rows).items()
    }


def response_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the columns from the result of ``response_to_tensors``, by their field of a generation."""
    columns = {c.response: c.from_tensors(tensors) for c in TOKEN_COLUMNS if c.response is not None}
    return {name: rows for name, rows in columns.items() if rows is not None}


def response_to_record(completion: object) -> dict[str, object]:
    """Return the columns of a completion as values of a recorded step, by Parquet column."""
    values: dict[str, object] = {}
    for column in _recorded():
        values |= column.to_record(getattr(completion, str(column.response)))
    return values


def response_from_record(row: Mapping[str, object], response_tokens: int) -> dict[str, object]:
    """Return the columns from the result of ``response_to_record``, by their field of a completion."""
    return {str(column.response): column.from_record(row, response_tokens) for column in _recorded()}


def record_types() -> dict[str, str]:
    """Return the Parquet columns of all token columns and their types, see ``TokenColumn.record_types``."""
    return {name: kind for column in _recorded() for name, kind in column.record_types().items()}


def _recorded() -> list[TokenColumn]:
    return [c for c in TOKEN_COLUMNS if c.record is not None and c.response is not None]
