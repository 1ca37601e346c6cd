"""Which data-parallel rank trains on which sample in which micro-batch, so that no rank waits for another.

The ranks of an expert-parallel group meet in every layer of every micro-batch: the i-th micro-batch takes as long as
that of the slowest of them. What counts is the sum of these, and not only the sum of each rank.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

_CLOSE = 0.002
"""How near to the least cost of a row a search ends."""
_GOOD = 0.995
"""The used share of the time from which on no other way is tried."""

RowAssignment = list[list[list[int]]]
"""``[ranks][rows of a rank]``, or ``[levels][rows of a level]``: lists of indices of samples"""


def assign_samples(
    lengths: Sequence[int], ranks: int, budget: int, *, attention_length: float, lockstep: int = 1, multiple: int = 1
) -> RowAssignment:
    """The rows of every rank: the fastest of three assignments (``compute_makespan``).

    Level by level (a level is the i-th rows of all ranks), in as few levels as the token budget allows: the longest
    samples left begin one row each, then each row takes the longest sample that still fits, up to a cost that is the
    same for all levels, or up to that of the level's longest sample. The least such cost that leaves no sample over is
    searched for. Or rank by rank, which is better where ranks do not meet or have few samples: each sample, longest
    first, to the rank with the least so far, whose rows are then filled as above, to the budget or evenly.

    A function of the arguments alone, so that all ranks find the same answer without talking.

    Args:
        lengths: padded tokens of each sample, of all ranks.
        ranks: data-parallel ranks.
        budget: tokens of one row; a longer sample gets a row of its own.
        attention_length: see ``cost``.
        lockstep: data-parallel ranks, one after another, that meet in every micro-batch.
        multiple: of which the number of rows of a rank has to be one.

    Returns:
        ``[ranks][rows of a rank]`` lists of indices into ``lengths``; equally many rows on every rank, some may be
        empty. Every rank gets a sample if there are as many as ranks.
    """
    costs = [cost(length, attention_length) for length in lengths]
    best, least = RowAssignment(), math.inf
    for rows in _ways(lengths, costs, ranks, budget, attention_length, multiple):
        time = compute_makespan(rows, costs, lockstep)
        if time < least:
            best, least = rows, time
        if least * ranks * _GOOD <= sum(costs):
            break
    return best


def cost(length: int, attention_length: float) -> float:
    """What a sequence costs, in tokens of a very short one: ``length + length**2 / attention_length``.

    ``attention_length`` is where attention costs a sequence as much as all matrices.
    """
    return length + length * length / attention_length


def compute_makespan(rows: RowAssignment, costs: Sequence[float], lockstep: int) -> float:
    """How long the slowest group of ``lockstep`` ranks takes, a micro-batch being as long as its costliest row."""
    by_rank = [[sum(costs[i] for i in row) for row in mine] for mine in rows]
    groups = (by_rank[first : first + lockstep] for first in range(0, len(rows), lockstep))
    return max(sum(map(max, zip(*group, strict=True))) for group in groups)


def _ways(
    lengths: Sequence[int],
    costs: Sequence[float],
    ranks: int,
    budget: int,
    attention_length: float,
    multiple: int,
) -> Iterator[RowAssignment]:
    of_all = _Filler(range(len(lengths)), lengths, ranks, budget, attention_length)
    fullest = of_all.fill(math.inf)
    count = -(-len(fullest) // multiple) * multiple
    yield _to_ranks(of_all.evenly(count) or fullest, ranks, count, costs)
    by_rank = [_Filler(mine, lengths, 1, budget, attention_length) for mine in _longest_first(costs, ranks)]
    each = [one.fill(math.inf) for one in by_rank]
    count = -(-max(map(len, each)) // multiple) * multiple
    yield [_to_ranks(rows, 1, count, costs)[0] for rows in each]
    even = [one.evenly(count) or rows for one, rows in zip(by_rank, each, strict=True)]
    yield [_to_ranks(rows, 1, count, costs)[0] for rows in even]


def _longest_first(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The samples of each rank: longest first, always to the rank with the least so far (and of these the fewest)."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, held, rank = heap[0]
        heapq.heapreplace(heap, (load + costs[i], held + 1, rank))
        owned[rank].append(i)
    return owned


class _Filler:
    """Fills levels of rows with some of the samples, which it keeps by rising length."""

    def __init__(
        self, samples: Sequence[int], lengths: Sequence[int], ranks: int, budget: int, attention_length: float
    ) -> None:
        self._ids = sorted(samples, key=lambda i: (lengths[i], i))
        self._lengths = [lengths[i] for i in self._ids]
        self._ranks, self._budget, self._attention = ranks, budget, attention_length

    def evenly(self, count: int) -> RowAssignment | None:
        """At most ``count`` levels of about the same cost; None if rows have to be as full as the budget allows."""
        found, too_low, high, tried = None, 0.0, cost(self._budget, self._attention), 0.0
        while too_low < high * (1 - _CLOSE):
            levels = self.fill(tried, count)
            if sum(len(row) for level in levels for row in level) == len(self._ids):
                found, high = levels, tried
            else:
                too_low = tried
            tried = (too_low + high) / 2
        return found

    def fill(self, highest: float, count: int | None = None) -> RowAssignment:
        """Levels of rows up to a cost, until there are ``count`` or nothing is left."""
        ids, lengths, levels = list(self._ids), list(self._lengths), RowAssignment()
        while lengths and len(levels) != count:
            top = max(highest, cost(lengths[-1], self._attention))
            begun = min(self._ranks, len(lengths))
            seeds = list(zip(ids[: -begun - 1 : -1], lengths[: -begun - 1 : -1], strict=True))
            del ids[-begun:], lengths[-begun:]
            levels.append([self._filled(first, length, top, ids, lengths) for first, length in seeds])
        return levels

    def _filled(self, first: int, length: int, top: float, ids: list[int], lengths: list[int]) -> list[int]:
        """A row that begins with a sample of ``length``, and takes what fits out of ``ids`` and ``lengths``."""
        row, room, left = [first], self._budget - length, top - cost(length, self._attention)
        while (i := bisect_right(lengths, min(room, self._longest_of(left))) - 1) >= 0:
            length = lengths.pop(i)
            row.append(ids.pop(i))
            room, left = room - length, left - cost(length, self._attention)
        return row

    def _longest_of(self, left: float) -> float:
        """The length of a sequence that costs ``left``."""
        half = self._attention / 2
        return math.sqrt(half * half + self._attention * left) - half if 0 < left < math.inf else left


def _to_ranks(levels: RowAssignment, ranks: int, count: int, costs: Sequence[float]) -> RowAssignment:
    """The costliest row of each level to the rank with the least so far, the next to the next; ``count`` rows each."""
    rows: RowAssignment = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for level in levels:
        by_cost = sorted(((sum(costs[i] for i in row), row) for row in level), key=lambda r: -r[0])
        by_cost += [(0.0, [])] * (ranks - len(level))
        for rank, (added, row) in zip(sorted(range(ranks), key=load.__getitem__), by_cost, strict=True):
            rows[rank].append(row)
            load[rank] += added
    return [mine + [[] for _ in range(count - len(mine))] for mine in rows]
