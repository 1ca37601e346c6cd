"""The kept set of each token: the ids that top-p, top-k and min-p left for it, as a ragged column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptSets:
    """T sets of ids, end to end; they have 1 to thousands of ids each, so that a rectangle would be mostly empty.

    A token was sampled from the softmax over its set alone, and is in it. Indexing picks rows, as of a tensor.

    Example: three tokens; the second one was given, so it has no set.

        >>> kept = KeptSets(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))
        >>> len(kept), kept[1:].ids.tolist(), kept[torch.tensor([2, 0])].ids.tolist()
        (3, [5], [5, 7, 2])
    """

    ids: Tensor
    """[N] int32, those of the first token, then those of the second, and so on; distinct within a set"""
    counts: Tensor
    """[T] int32, always on the CPU: how many of them each token has; 0 = no set, the whole vocabulary"""

    @classmethod
    def none(cls, length: int) -> KeptSets:
        """``length`` tokens without a set."""
        return cls(torch.empty(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @classmethod
    def cat(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """The tokens of all parts, one after the other."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Tensor | slice) -> KeptSets:
        """The tokens at ``rows``: a slice without step, or int64 or bool on the CPU (others are waited for)."""
        counts = self.counts
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(counts))
            first = int(counts[:start].sum())
            return KeptSets(self.ids[first : first + int(counts[start:stop].sum())], counts[start:stop])
        rows = rows.cpu()
        starts, chosen = counts.cumsum(0)[rows] - counts[rows], counts[rows]
        # Entry i of the result is entry i - (what came before its row there) of its row here.
        places = torch.arange(int(chosen.sum())) + (starts - chosen.cumsum(0) + chosen).repeat_interleave(chosen)
        return KeptSets(self.ids[places.to(self.ids.device, non_blocking=True)], chosen)

    def to(self, device: torch.device) -> KeptSets:
        """The same with its ids on ``device``."""
        return KeptSets(self.ids.to(device, non_blocking=True), self.counts)


def check_kept(kept: KeptSets, rows: int) -> None:
    """The columns fit together and ``rows``.

    Raises:
        ValueError: another number of rows, a negative count, counts that do not add up to the ids, or another type.
    """
    ids, counts = kept.ids, kept.counts
    if ids.dim() != 1 or ids.dtype != torch.int32 or counts.shape != (rows,) or counts.dtype != torch.int32:
        raise ValueError(
            f"kept sets of int32 ids [N] and counts [{rows}] are expected, one a token, got {ids.dtype} "
            f"{list(ids.shape)} and {counts.dtype} {list(counts.shape)}"
        )
    if (counts < 0).any() or int(counts.sum()) != len(ids):
        raise ValueError(
            f"the counts of the kept sets are {int(counts.min())} at least and {int(counts.sum())} in all, "
            f"expected 0 or more, and the {len(ids)} ids that there are"
        )
