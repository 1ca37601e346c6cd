"""Which data-parallel rank trains on which sample, so that no rank waits for the one with the longest answers."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_owners(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """A new owner for every sample: longest first, always to the rank with the fewest tokens so far.

    The totals of two ranks then differ by at most the longest sample (Graham's bound for longest processing time). A
    function of the lengths alone, so that all ranks find the same answer without talking.

    Args:
        lengths: tokens of each sample, by the rank that holds it now.

    Returns:
        The new owner, in the same shape. Every rank gets a sample if there are as many as ranks.
    """
    load = [0] * len(lengths)
    held = [0] * len(lengths)
    owners = [[0] * len(mine) for mine in lengths]
    samples = [(length, rank, i) for rank, mine in enumerate(lengths) for i, length in enumerate(mine)]
    for length, rank, i in sorted(samples, key=lambda s: (-s[0], s[1], s[2])):
        # Of ranks that are equally loaded the present owner keeps it: what stays need not be sent.
        target = min(range(len(load)), key=lambda r: (load[r], held[r], r != rank, r))
        owners[rank][i] = target
        load[target] += length
        held[target] += 1
    return owners
