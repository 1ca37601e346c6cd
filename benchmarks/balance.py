"""Utilization of GPUs whose ranks wait for each other in every micro-batch, by method of assigning samples.

    python benchmarks/balance.py

One update of 64 data-parallel ranks, four of which form an expert-parallel group (TP2 EP8). The time of micro-batch i
is that of the slowest of these four, and the update takes as long as the slowest four. Printed is useful work over what
all ranks could do in that time, in tokens and in FLOPs (``policy.costs``): means of three seeds. Seconds are of the
CPU. Nothing is trained.

The others' ways are written here anew from their public sources: verl's ``seqlen_balancing.py`` (Karmarkar-Karp over
the ranks with as many samples each, then over each rank's micro-batches, by 24576 n + n**2) and slime's
``dp_schedule.py`` (first-fit over all samples, the largest micro-batches halved until they divide, Karmarkar-Karp over
the ranks by FLOPs). verl's may exceed the token budget; the last column says by how much.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_dppo.data.balance import RowAssignment, assign_samples, compute_makespan, cost

ATTENTION = 15_471.0
"""``attention_length`` of Qwen3-30B-A3B."""
RANKS, TOGETHER = 64, 4
Way = Callable[[list[int], int], RowAssignment]


def karmarkar_karp(costs: Sequence[float], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Partition by the largest differencing method; ``equal``: with as many items in each part."""
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    step = parts if equal else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, first in enumerate(range(0, len(order), step)):
        sums = [(costs[i], [i]) for i in order[first : first + step]]
        sums = sorted([*sums, *[(0.0, list[int]())] * (parts - len(sums))], key=lambda s: -s[0])
        heap.append((sums[-1][0] - sums[0][0], number, sums))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        sums = sorted(
            ((a + b, p + q) for (a, p), (b, q) in zip(one, reversed(other), strict=True)), key=lambda s: -s[0]
        )
        heapq.heappush(heap, (sums[-1][0] - sums[0][0], number, sums))
        number += 1
    return [part for _, part in heap[0][2]]


def verl(lengths: list[int], budget: int) -> RowAssignment:
    """Assign samples to ranks by cost; the fullest rank determines the number of micro-batches."""
    costs = [24576 * n + n * n for n in lengths]
    owned = karmarkar_karp(costs, RANKS, equal=True)
    count = max(-(-sum(lengths[i] for i in rank_samples) // budget) for rank_samples in owned)
    rows = []
    for rank_samples in owned:
        parts = [[rank_samples[i] for i in part] for part in karmarkar_karp([costs[i] for i in rank_samples], count)]
        parts.sort(key=lambda part: -sum(costs[i] for i in part))
        rows.append(parts[::2][::-1] + parts[1::2])
    return rows


def slime(lengths: list[int], budget: int) -> RowAssignment:
    """Form micro-batches first, then assign them to ranks."""
    rows: list[list[int]] = []
    for i, length in enumerate(lengths):
        fits = next((row for row in rows if sum(lengths[j] for j in row) + length <= budget), None)
        rows.append([i]) if fits is None else fits.append(i)
    while len(rows) % RANKS:
        largest = max((row for row in rows if len(row) > 1), key=lambda row: sum(lengths[i] for i in row))
        rows.remove(largest)
        rows += [[largest[i] for i in part] for part in karmarkar_karp([lengths[i] for i in largest], 2)]
    costs = [sum(cost(lengths[i], ATTENTION) for i in row) for row in rows]
    return [[rows[i] for i in owned] for owned in karmarkar_karp(costs, RANKS, equal=True)]


def first_fit(lengths: list[int], budget: int) -> RowAssignment:
    """Assign as this package did before: longest first, first-fit on each rank, then halve the fullest rows."""
    owned: list[list[int]] = [[] for _ in range(RANKS)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(owned, key=lambda rank_samples: (sum(lengths[j] for j in rank_samples), len(rank_samples))).append(i)
    rows: RowAssignment = []
    for rank_samples in owned:
        bins: list[list[int]] = []
        for i in rank_samples:
            fits = next((row for row in bins if sum(lengths[j] for j in row) + lengths[i] <= budget), None)
            bins.append([i]) if fits is None else fits.append(i)
        rows.append(bins)
    count = max(map(len, rows))
    for bins in rows:
        while len(bins) < count and any(len(row) > 1 for row in bins):
            k = max(range(len(bins)), key=lambda k: len(bins[k]))
            bins[k : k + 1] = [bins[k][::2], bins[k][1::2]]
        bins += [[]] * (count - len(bins))
    return rows


def by_flops(lengths: list[int], budget: int) -> RowAssignment:
    """Assign as the trainer does."""
    return assign_samples(lengths, RANKS, budget, attention_length=ATTENTION, lockstep=TOGETHER)


def by_tokens(lengths: list[int], budget: int) -> RowAssignment:
    """Assign as if attention cost nothing."""
    return assign_samples(lengths, RANKS, budget, attention_length=1e12, lockstep=TOGETHER)


WAYS: dict[str, Way] = {
    "first-fit (before)": first_fit,
    "verl": verl,
    "slime": slime,
    "dealt, by tokens": by_tokens,
    "dealt, by FLOPs": by_flops,
}


def log_normal(rng: random.Random, count: int, longest: int) -> list[int]:
    """Return lengths of prompts of 200 tokens with responses of 6,000 tokens on average after truncation."""
    draws = [math.exp(0.8 * rng.gauss(0, 1)) for _ in range(count)]
    low, high = 1000.0, 60_000.0
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(min(longest, middle * draw) for draw in draws) / count
        low, high = (middle, high) if mean < 6000 else (low, middle)
    return [200 + max(1, int(min(longest, low * draw))) for draw in draws]


def equal(rng: random.Random, count: int) -> list[int]:
    """Return equal lengths."""
    return [rng.choice([3000, 6000, 9000])] * count


CASES: dict[str, tuple[int, Callable[[random.Random], list[int]]]] = {
    "log-normal, max 16k, 512 samples": (17408, lambda rng: log_normal(rng, 512, 16384)),
    "log-normal, max 16k, 1024 samples": (17408, lambda rng: log_normal(rng, 1024, 16384)),
    "log-normal, max 20k, 512 samples": (21504, lambda rng: log_normal(rng, 512, 20480)),
    "the same, rows of 32k": (32768, lambda rng: log_normal(rng, 512, 20480)),
    "log-normal, max 16k, 4096 samples": (17408, lambda rng: log_normal(rng, 4096, 16384)),
    "uniform to 16k, 512": (17408, lambda rng: [rng.randint(1, 16384) for _ in range(512)]),
    "equal, 512": (17408, lambda rng: equal(rng, 512)),
    "300 or 16k, 512": (17408, lambda rng: [rng.choice([300, 16000]) for _ in range(512)]),
    "heavy tail, 512": (17408, lambda rng: [min(16384, int(300 * rng.paretovariate(1.1))) for _ in range(512)]),
    "log-normal, max 16k, 128": (17408, lambda rng: log_normal(rng, 128, 16384)),
}


def measure(way: Way, budget: int, made: Callable[[random.Random], list[int]]) -> list[float]:
    """Return utilization in tokens and FLOPs, micro-batches, seconds, and tokens of the fullest row over the budget."""
    per_seed = []
    for seed in range(3):
        lengths = made(random.Random(seed))
        start = time.process_time()
        rows = way(lengths, budget)
        seconds = time.process_time() - start
        assert sorted(i for rank_samples in rows for row in rank_samples for i in row) == list(range(len(lengths)))
        fullest = max(sum(lengths[i] for i in row) for rank_samples in rows for row in rank_samples)
        used = []
        for costs in ([float(n) for n in lengths], [cost(n, ATTENTION) for n in lengths]):
            used.append(sum(costs) / (RANKS * compute_makespan(rows, costs, TOGETHER)))
        per_seed.append([*used, len(rows[0]), seconds, max(1.0, fullest / budget)])
    return [statistics.mean(column) for column in zip(*per_seed, strict=True)]


def main() -> int:
    """Print the table."""
    for name, (budget, made) in CASES.items():
        print(f"\n{name}, rows of {budget}\n{'':<22}tokens  FLOPs   micro-batches  seconds  over budget")
        for way, deals in WAYS.items():
            tokens, flops, count, seconds, over = measure(deals, budget, made)
            print(f"{way:<22}{tokens:<8.3f}{flops:<8.3f}{count:<15.1f}{seconds:<9.3f}{over - 1:.0%}")
    lengths = log_normal(random.Random(0), 16_384, 16384)
    start = time.process_time()
    by_flops(lengths, 17408)
    print(f"\n16,384 samples are dealt in {time.process_time() - start:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
