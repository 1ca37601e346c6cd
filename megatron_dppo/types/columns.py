"""Columns of numbers: what the declaration of one says (``types.token_columns``), and what is done by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types.kept import KeptSets, check_kept
from megatron_dppo.types.rollouts import SamplingParams

TokenRows = Tensor | KeptSets
"""Values of a column, one row per token. ``len``, slices and ``to`` work on both forms."""


def as_bytes(column: Tensor) -> Tensor:
    """uint8 ``[nbytes]`` of the numbers in order; the same memory where they lie together, which ``column`` keeps.

    Torch calls a tensor of one element contiguous whatever its stride is, and then cannot view it as another type.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:, 1]).tolist()
        [2, 0, 4, 0]
    """
    return column.detach().contiguous().as_strided((column.numel(),), (1,)).view(torch.uint8)


class Alignment(StrEnum):
    """Which tokens the rows of a column belong to. P prompt tokens, R response tokens."""

    RESPONSE = "response"
    """[R] the response's tokens. A training sample holds them as they are; ``pack`` puts them at the sample's end."""
    INPUTS = "inputs"
    """[P + R - 1] the tokens that the model read: all of the sequence but the last."""
    LABELS = "labels"
    """[P + R - 1] the labels of a training sample. A response holds [R] of them, which ``data.samples`` shifts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumn:
    """Declaration of one column whose rows are numbers, or arrays of equal shape.

    It takes three names, because the records that hold it had them before:

    - ``response``: in ``Generation``, ``PartialResponse`` and ``Completion``, one row per response token;
    - ``name``: in ``TrainingSample``, ``MicroBatch`` and ``TokenTargets``, aligned to the labels;
    - ``record``: in the Parquet file of a recorded step.
    """

    response: str | None = None
    """Field of a response. None: the trainer makes the column."""
    name: str | None = None
    """Field of a training sample and of packed rows. None: training does not read the column."""
    record: str | None = None
    """Column of a recorded step. None: not recorded."""
    dtype: torch.dtype | None
    """None: that of the model's ``RoutingShape``."""
    row: tuple[str, ...] = ()
    """Dimensions of one token's row, for error messages; a plain number has none."""
    alignment: Alignment
    fill: float | Mapping[torch.dtype, int]
    """Value on padding and on tokens that were given, not sampled; by dtype where that matters."""
    asked: Callable[[SamplingParams], tuple[int, ...] | None] | None = None
    """Shape of a row where these parameters ask for the column, else None. Without a function it is always there, or,
    as routes are, asked for by other means."""
    is_optional: bool = True
    """False: every training sample has it."""
    is_packed: bool = True
    """False: used before samples are packed."""
    is_loss_only: bool = False
    """Only the rank that computes the loss reads it: the other pipeline stages are not sent it."""

    @property
    def title(self) -> str:
        """Name in error messages."""
        return self.name or self.response or ""

    @property
    def is_carried(self) -> bool:
        """Whether a training sample holds the response's rows as they are, without a shift or a mask."""
        return self.response is not None and self.name is not None and self.alignment != Alignment.LABELS

    # One response

    def new(self, *shape: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of ``shape`` that holds the fill value."""
        dtype = dtype or self.dtype
        assert dtype is not None, f"{self.title} has the dtype of its model: pass dtype="
        return torch.full(shape, self.fill_of(dtype), dtype=dtype, device=device)

    def fill_of(self, dtype: torch.dtype) -> float:
        """Return the fill value for a dtype."""
        return self.fill[dtype] if isinstance(self.fill, Mapping) else self.fill

    def empty(self, row_shape: tuple[int, ...]) -> TokenRows:
        """Return no rows, of ``row_shape`` each."""
        return self.new(0, *row_shape)

    def filled(self, count: int, like: TokenRows) -> TokenRows:
        """Return ``count`` rows of fill, of the shape and dtype of ``like``."""
        assert isinstance(like, Tensor)
        return self.new(count, *like.shape[1:], dtype=like.dtype)

    def join(self, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts, one after the other; a single part is not copied."""
        return parts[0] if len(parts) == 1 else torch.cat([part for part in parts if isinstance(part, Tensor)])

    def num_rows(self, prompt_tokens: int, response_tokens: int) -> int:
        """Return how many rows a response has, or the last ones of a training sample."""
        if self.alignment == Alignment.INPUTS:
            return max(0, prompt_tokens + response_tokens - 1)
        return response_tokens

    def check(self, rows: TokenRows, prompt_tokens: int, response_tokens: int) -> None:
        """Check the number of rows and their dimensions.

        Raises:
            ValueError: ``rows`` do not have the declared form, or are those of another number of tokens.
        """
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

    # Packed rows

    def form(self, rows: TokenRows | None) -> Any:
        """Return what has to be equal for the samples of one packed row. None: the column is missing."""
        return (rows.dtype, rows.shape[1:]) if isinstance(rows, Tensor) else None

    def pack(self, parts: Sequence[TokenRows], ends: Sequence[int], size: int, like: TokenRows) -> TokenRows:
        """Return ``size`` rows in which each part ends before the position of ``ends``, with fill everywhere else.

        ``like`` has the dtype and the row's shape, for a packed row without samples.
        """
        assert isinstance(like, Tensor)
        packed = like.new_full((size, *like.shape[1:]), self.fill_of(like.dtype))
        for part, end in zip(parts, ends, strict=True):
            assert isinstance(part, Tensor)
            packed[end - len(part) : end] = part
        return packed

    # Between processes

    def to_tensors(self, rows: TokenRows) -> dict[str, Tensor]:
        """Return the tensors that are sent in place of the column, by name."""
        assert isinstance(rows, Tensor) and self.response is not None
        return {self.response: rows}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> TokenRows | None:
        """Return the column of ``to_tensors``; None if it was not sent."""
        return None if self.response is None else tensors.get(self.response)

    # Recorded steps

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns and their types: ``bytes``, ``text``, or a list's, such as ``int32s``."""
        assert self.record is not None
        kinds = {torch.int32: "int32s", torch.float32: "float32s", torch.bool: "bools"}
        return {self.record: kinds[self.new(0).dtype]}

    def to_record(self, rows: TokenRows | None) -> dict[str, Any]:
        """Return the values of one sample by Parquet column; lists are flat arrays."""
        assert self.record is not None
        return {self.record: rows.flatten().numpy() if isinstance(rows, Tensor) else None}

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the column of ``to_record``. None: the sample has none, or the file is older than the column."""
        assert self.record is not None
        values = row.get(self.record)
        if values is None:
            return None
        flat = torch.tensor(values, dtype=self.dtype)
        return flat.view(response_tokens, -1) if self.row else flat


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSetsColumn(TokenColumn):
    """A column of ``KeptSets``: as many ids a token as its sampling filter left."""

    @property
    def title(self) -> str:
        """Name in error messages."""
        return "kept sets"

    @property
    def _parts(self) -> tuple[str, str]:
        return f"{self.response}_ids", f"{self.response}_counts"

    def empty(self, row_shape: tuple[int, ...]) -> TokenRows:
        """Return no sets."""
        return KeptSets.none(0)

    def filled(self, count: int, like: TokenRows) -> TokenRows:
        """Return ``count`` tokens without a set."""
        return KeptSets.none(count)

    def join(self, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the sets of all parts, one after the other."""
        return parts[0] if len(parts) == 1 else KeptSets.cat([part for part in parts if isinstance(part, KeptSets)])

    def check(self, rows: TokenRows, prompt_tokens: int, response_tokens: int) -> None:
        """See ``types.check_kept``."""
        assert isinstance(rows, KeptSets)
        check_kept(rows, response_tokens)

    def form(self, rows: TokenRows | None) -> Any:
        """Return what has to be equal for the samples of one packed row."""
        return None if rows is None else KeptSets

    def pack(self, parts: Sequence[TokenRows], ends: Sequence[int], size: int, like: TokenRows) -> TokenRows:
        """Return the sets of ``size`` tokens; those between the parts have none."""
        packed = KeptSets.none(size)
        ids = [packed.ids]
        for part, end in zip(parts, ends, strict=True):
            assert isinstance(part, KeptSets)
            packed.counts[end - len(part) : end] = part.counts
            ids.append(part.ids)
        return KeptSets(torch.cat(ids), packed.counts)

    def to_tensors(self, rows: TokenRows) -> dict[str, Tensor]:
        """Return ids and counts."""
        assert isinstance(rows, KeptSets)
        return dict(zip(self._parts, (rows.ids, rows.counts), strict=True))

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> TokenRows | None:
        """Return the sets of ids and counts; None if they were not sent."""
        ids, counts = map(tensors.get, self._parts)
        return None if ids is None or counts is None else KeptSets(ids, counts)

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns of ids and counts."""
        return dict.fromkeys(self._parts, "int32s")

    def to_record(self, rows: TokenRows | None) -> dict[str, Any]:
        """Return ids and counts of one sample."""
        if rows is None:
            return dict.fromkeys(self._parts)
        return {name: tensor.numpy() for name, tensor in self.to_tensors(rows).items()}

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the sets of ``to_record``."""
        values = {name: row.get(name) for name in self._parts}
        return self.from_tensors(
            {name: torch.tensor(v, dtype=torch.int32) for name, v in values.items() if v is not None}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutesColumn(TokenColumn):
    """The experts of each token and layer; recorded as bytes, since no list type of Parquet is as small."""

    @property
    def _parts(self) -> tuple[str, str, str]:
        return f"{self.record}", f"{self.record}_shape", f"{self.record}_dtype"

    def record_types(self) -> dict[str, str]:
        """Return the Parquet columns of bytes, shape and dtype."""
        return dict(zip(self._parts, ("bytes", "int32s", "text"), strict=True))

    def to_record(self, rows: TokenRows | None) -> dict[str, Any]:
        """Return bytes, shape and dtype of one sample."""
        if not isinstance(rows, Tensor):
            return dict.fromkeys(self._parts)
        values = (rows.contiguous().numpy().tobytes(), list(rows.shape), str(rows.dtype).removeprefix("torch."))
        return dict(zip(self._parts, values, strict=True))

    def from_record(self, row: Mapping[str, Any], response_tokens: int) -> TokenRows | None:
        """Return the routes of ``to_record``."""
        content, shape, dtype = (row.get(name) for name in self._parts)
        if content is None or shape is None or dtype is None:
            return None
        return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(*shape)
