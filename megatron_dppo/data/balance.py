"""Assignment of samples to data-parallel ranks and micro-batches, so that no rank waits for another.

The ranks of an expert-parallel group meet in every layer of every micro-batch: the i-th micro-batch takes as long as
that of their slowest rank. So the sum over micro-batches of the slowest rank's time counts, not each rank's own sum.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

_TOLERANCE = 0.002
"""Relative precision at which the search for the least cost of a row ends."""
_GOOD_UTILIZATION = 0.995
"""Utilization from which no further assignment is tried."""

RowAssignment = list[list[list[int]]]
"""``[ranks][rows of a rank]`` or ``[levels][rows of a level]``: lists of sample indices."""


def assign_samples(
    lengths: Sequence[int], ranks: int, budget: int, *, attention_length: float, lockstep: int = 1, multiple: int = 1
) -> RowAssignment:
    """Return the rows of every rank, by the fastest of three assignments (``compute_makespan``).

    The first assigns level by level (level i is the i-th rows of all ranks), in as few levels as the token budget
    allows. The longest remaining samples start one row each. Each row then takes the longest sample that still fits, up
    to a cost that is the same for all levels, or up to that of the level's longest sample. The least such cost that
    leaves no sample over is searched for.

    The others assign rank by rank, which is better if ranks do not meet or have few samples. Each sample, longest
    first, goes to the rank with the least cost so far. The rows of a rank are then filled as above, either up to the
    budget or evenly.

    The result depends on the arguments alone, so all ranks compute the same one without communication. ``lengths`` are
    the padded tokens of each sample over all ranks, ``budget`` those of one row; a longer sample gets a row of its own.
    ``lockstep`` consecutive data-parallel ranks meet in every micro-batch. Every rank has the same number of rows, a
    multiple of ``multiple``, some of which may be empty, and gets a sample if there are enough.
    """
    costs = [cost(length, attention_length) for length in lengths]
    best = RowAssignment()
    least = math.inf
    for rows in _candidates(lengths, costs, ranks, budget, attention_length, multiple):
        time = compute_makespan(rows, costs, lockstep)
        if time < least:
            best = rows
            least = time
        if least * ranks * _GOOD_UTILIZATION <= sum(costs):
            break
    return best


def cost(length: int, attention_length: float) -> float:
    """Return the cost of a sequence, in tokens of a very short one: ``length + length**2 / attention_length``.

    ``attention_length`` is the length at which attention costs as much as all matrices, infinite if it has no square.
    """
    return length + length * length / attention_length


def compute_makespan(rows: RowAssignment, costs: Sequence[float], lockstep: int) -> float:
    """Return the time of the slowest group of ``lockstep`` ranks; a micro-batch takes as long as its costliest row."""
    row_costs = [[sum(costs[i] for i in row) for row in rank_rows] for rank_rows in rows]
    groups = (row_costs[first : first + lockstep] for first in range(0, len(rows), lockstep))
    # ``zip`` puts the i-th rows of a group's ranks together: they meet, so the costliest decides.
    return max(sum(map(max, zip(*group, strict=True))) for group in groups)


def _candidates(
    lengths: Sequence[int],
    costs: Sequence[float],
    ranks: int,
    budget: int,
    attention_length: float,
    multiple: int,
) -> Iterator[RowAssignment]:
    """Yield the three assignments that ``assign_samples`` describes."""
    # Level by level.
    filler = _Filler(range(len(lengths)), lengths, ranks, budget, attention_length)
    fullest = filler.fill(math.inf)
    count = -(-len(fullest) // multiple) * multiple
    yield _to_ranks(filler.fill_evenly(count) or fullest, ranks, count, costs)

    # Rank by rank, rows up to the budget.
    rank_samples = _assign_longest_first(costs, ranks)
    fillers = [_Filler(samples, lengths, 1, budget, attention_length) for samples in rank_samples]
    full = [one.fill(math.inf) for one in fillers]
    count = -(-max(map(len, full)) // multiple) * multiple
    yield [_to_ranks(rows, 1, count, costs)[0] for rows in full]

    # Rank by rank, rows of about the same cost.
    even = [one.fill_evenly(count) or rows for one, rows in zip(fillers, full, strict=True)]
    yield [_to_ranks(rows, 1, count, costs)[0] for rows in even]


def _assign_longest_first(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the samples of each rank: longest first, each to the rank with the least cost, then the fewest samples."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, num_samples, rank = heap[0]
        heapq.heapreplace(heap, (load + costs[i], num_samples + 1, rank))
        assigned[rank].append(i)
    return assigned


class _Filler:
    """Fills levels of rows with some of the samples, stored by rising length."""

    def __init__(
        self, samples: Sequence[int], lengths: Sequence[int], ranks: int, budget: int, attention_length: float
    ) -> None:
        self._ids = sorted(samples, key=lambda i: (lengths[i], i))
        self._lengths = [lengths[i] for i in self._ids]
        self._ranks = ranks
        self._budget = budget
        self._attention = attention_length

    def fill_evenly(self, count: int) -> RowAssignment | None:
        """Return at most ``count`` levels of about the same cost. None if only full rows hold all samples."""
        best = None
        too_low = 0.0
        high = cost(self._budget, self._attention)
        limit = 0.0
        # Bisect the cost of a row. A limit of 0 lets the longest sample of each level decide.
        while too_low < high * (1 - _TOLERANCE):
            levels = self.fill(limit, count)
            if sum(len(row) for level in levels for row in level) == len(self._ids):
                best = levels
                high = limit
            else:
                too_low = limit
            limit = (too_low + high) / 2
        return best

    def fill(self, limit: float, count: int | None = None) -> RowAssignment:
        """Return levels of rows up to a cost, until there are ``count`` or no sample is left."""
        ids = list(self._ids)
        lengths = list(self._lengths)
        levels = RowAssignment()
        while lengths and len(levels) != count:
            top = max(limit, cost(lengths[-1], self._attention))
            num_rows = min(self._ranks, len(lengths))
            # The longest samples, from the end: both lists are sorted by length.
            seeds = list(zip(ids[: -num_rows - 1 : -1], lengths[: -num_rows - 1 : -1], strict=True))
            del ids[-num_rows:], lengths[-num_rows:]
            levels.append([self._fill_row(first, length, top, ids, lengths) for first, length in seeds])
        return levels

    def _fill_row(self, first: int, length: int, top: float, ids: list[int], lengths: list[int]) -> list[int]:
        """Return a row that starts with a sample of ``length``; samples that fit are removed from ``ids``."""
        row = [first]
        tokens_left = self._budget - length
        cost_left = top - cost(length, self._attention)
        while (i := bisect_right(lengths, min(tokens_left, self._max_length(cost_left))) - 1) >= 0:
            length = lengths.pop(i)
            row.append(ids.pop(i))
            tokens_left -= length
            cost_left -= cost(length, self._attention)
        return row

    def _max_length(self, cost_left: float) -> float:
        """Return the length of a sequence that costs ``cost_left``, the inverse of ``cost``."""
        # The positive root of length + length**2 / attention = cost. It is the cost where attention has no square.
        if 0 < cost_left < math.inf:
            return 2 * cost_left / (1 + math.sqrt(1 + 4 * cost_left / self._attention))
        return cost_left


def _to_ranks(levels: RowAssignment, ranks: int, count: int, costs: Sequence[float]) -> RowAssignment:
    """Assign the rows of each level to ranks, the costliest to the rank with the least cost; ``count`` rows each."""
    rows: RowAssignment = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for level in levels:
        by_cost = sorted(((sum(costs[i] for i in row), row) for row in level), key=lambda r: -r[0])
        # A level may have fewer rows than there are ranks.
        by_cost += [(0.0, [])] * (ranks - len(level))
        for rank, (added, row) in zip(sorted(range(ranks), key=load.__getitem__), by_cost, strict=True):
            rows[rank].append(row)
            load[rank] += added
    return [rank_rows + [[] for _ in range(count - len(rank_rows))] for rank_rows in rows]
