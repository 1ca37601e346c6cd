"""Parameters of a request to an engine, and the columns of its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


def as_bytes(column: Tensor) -> Tensor:
    """Return the bytes of the numbers in order, uint8 [num_bytes].

    The result shares the memory of a contiguous column. ``as_strided`` is needed because torch calls a tensor of one
    element contiguous whatever its stride is, and then cannot view it as another type.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:, 1]).tolist()
        [2, 0, 4, 0]
    """
    return column.detach().contiguous().as_strided((column.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Sampling masks of T tokens: the ids that the sampling filters (top-p, top-k, min-p) allowed at each position.

    A token was sampled from the softmax over its allowed ids alone, and is one of them. The sets have 1 to thousands of
    ids, so they are stored one after the other: a padded rectangle would be mostly empty. Indexing selects tokens, as
    in a tensor.

    Not to be confused with the loss mask (tokens that are trained) and the keep mask (tokens whose update the trust
    region keeps).

    Example: Three tokens. The second one was not sampled (a tool wrote it), so it has no mask.

        >>> mask = SamplingMask(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))
        >>> len(mask), mask[1:].ids.tolist(), mask[torch.tensor([2, 0])].ids.tolist()
        (3, [5], [5, 7, 2])
    """

    ids: Tensor
    """Allowed ids of the first token, then those of the second, and so on. Int32, shape [N]. Distinct within a
    token."""
    counts: Tensor
    """Number of allowed ids of each token. Int32 on the CPU, shape [T]. 0 means no filter: the whole vocabulary."""

    @classmethod
    def none(cls, length: int) -> SamplingMask:
        """Return ``length`` tokens without a mask."""
        return cls(torch.empty(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @classmethod
    def cat(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Return the tokens of all parts, one after the other."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Tensor | slice) -> SamplingMask:
        """Return the tokens at ``rows``: a slice without step, or an int64 or bool tensor on the CPU."""
        counts = self.counts
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(counts))
            # The counts are on the CPU, so finding the ids of the first token does not wait for the device.
            first = int(counts[:start].sum())
            return SamplingMask(self.ids[first : first + int(counts[start:stop].sum())], counts[start:stop])
        rows = rows.cpu()
        chosen = counts[rows]
        starts = counts.cumsum(0)[rows] - chosen
        # Where a row starts in the result, and so by how much its entries shift.
        new_starts = chosen.cumsum(0) - chosen
        indices = torch.arange(int(chosen.sum())) + (starts - new_starts).repeat_interleave(chosen)
        return SamplingMask(self.ids[indices.to(self.ids.device, non_blocking=True)], chosen)

    def to(self, device: torch.device) -> SamplingMask:
        """Return the same mask with its ids on ``device``; the counts stay on the CPU."""
        return SamplingMask(self.ids.to(device, non_blocking=True), self.counts)


def check_sampling_mask(sampling_mask: SamplingMask, rows: int) -> None:
    """Check that ids and counts fit each other and the number of tokens ``rows``."""
    ids, counts = sampling_mask.ids, sampling_mask.counts
    if ids.dim() != 1 or ids.dtype != torch.int32 or counts.shape != (rows,) or counts.dtype != torch.int32:
        raise ValueError(
            f"sampling masks of int32 ids [N] and counts [{rows}] are expected, one a token, got {ids.dtype} "
            f"{list(ids.shape)} and {counts.dtype} {list(counts.shape)}"
        )
    if (counts < 0).any() or int(counts.sum()) != len(ids):
        raise ValueError(
            f"the counts of the sampling masks are {int(counts.min())} at least and {int(counts.sum())} in all, "
            f"expected 0 or more, and the {len(ids)} ids that there are"
        )


class FinishReason(StrEnum):
    """Reasons why an engine stopped sampling. Each is a metric, ``rollout/finish/<reason>``."""

    STOP = "stop"
    """An end token, which is the last token of the response."""
    LENGTH = "length"
    """The limit of new tokens."""
    ABORT = "abort"
    """The request was aborted. A ``Completion`` never has it: an aborted response is resumed or given up."""


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)``, all sampled by one server with the weights of ``policy_version``."""

    policy_version: int
    start: int
    end: int
    server: str = ""
    """URL of the server. Empty for an engine in this process."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request.

    ``temperature`` 0 means greedy. ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 disable the filters, which work on the
    distribution at the temperature.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Smallest allowed probability, as a share of the largest one."""
    seed: int = 0
    # Columns that the engine returns besides the tokens and their log-probabilities.
    topk_logprobs: int = 0
    """K: also return the K most probable tokens of every position. 0 disables it."""
    routed_experts: bool = False
    """Also return the experts that the routers chose."""
    router_weights: bool = False
    """Also return the combine weights of the chosen experts."""
    return_sampling_mask: bool = False
    """Also return the ids that the filters allowed at each token."""
    columns: tuple[str, ...] = ()
    """Further columns to return, named as in ``COLUMN_LIMITS``."""

    def __post_init__(self) -> None:
        # JSON between processes has lists.
        object.__setattr__(self, "columns", tuple(self.columns))

    @property
    def has_filters(self) -> bool:
        """True if a filter excludes some ids."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


COLUMN_LIMITS: dict[str, tuple[float, float]] = {}
"""Columns that a request names in ``SamplingParams.columns``, by their field of ``ResponseColumns``: one float32 a
token, with its smallest and largest correct value. A value that is not finite is always refused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseColumns:
    """Columns of a response that engines return on request. R response tokens.

    ``types.token_columns`` declares them, and the columns that every response has.
    """

    topk_token_ids: Tensor | None = None
    """Top-K ids. Int32, shape [R, K+1]. Slots 0 to K-1 hold the most probable tokens by rank. Slot K holds the sampled
    token if it is not one of them, else -1. -1 marks an unused slot everywhere."""
    topk_logprobs: Tensor | None = None
    """Log-probabilities of these ids. Float32, shape [R, K+1]. -inf is valid: a filter excludes the id."""
    sampling_mask: SamplingMask | None = None
    """Sampling masks of R tokens. ``logprobs`` and the Top-K are then of the softmax over the allowed ids. Tokens that
    were not sampled have no mask. None if not requested."""
    routed_experts: Tensor | None = None
    """Experts that the engine's routers chose for each token of prompt and response but the last, in each of the
    model's L layers. Uint8 or int16, shape [P + R - 1, L, k] with k experts per token; see ``MISSING_EXPERT``. With
    ``SamplingParams.router_weights`` the last dimension is ``RoutingShape.width``."""
