"""Shares of several sources in one stream of prompts, by position alone."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm


class SourceMix:
    """Source of each prompt of an endless stream, in fixed shares.

    Of the first n prompts each source has ``n * share``, rounded up or down. So any n prompts in a row have at most one
    more or one less than that. It is the schedule of Liu and Layland for jobs of one slot: of the sources that may have
    the next prompt without exceeding their share, the one whose next prompt is due first. The ratios of the weights are
    those of the written decimals.

    Example:
        >>> mix = SourceMix([3, 1])
        >>> [mix.locate(i) for i in range(5)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
        >>> mix.count(0, 100), mix.count(1, 100)
        (75, 25)
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # By their decimals: the binary fraction of 0.7 would make a period of 2**53 prompts.
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        self.shares = tuple(weight // gcd(*integers) for weight in integers)
        """Number of prompts of each source in one period. After a period the order repeats."""
        self.period = sum(self.shares)
        self._sources = array("H")
        """Source of each prompt of the period, as far as it was needed."""
        self._slots = [array("q") for _ in integers]
        """Slots of each source in that part of the period."""

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of prompt ``index`` and the number of its prompts before."""
        periods, slot = divmod(index, self.period)
        self._extend(slot + 1)
        source = self._sources[slot]
        return source, periods * self.shares[source] + bisect_left(self._slots[source], slot)

    def count(self, source: int, num_prompts: int) -> int:
        """Return how many of the first ``num_prompts`` prompts are from ``source``."""
        periods, slots = divmod(num_prompts, self.period)
        self._extend(slots)
        return periods * self.shares[source] + bisect_left(self._slots[source], slots)

    def _extend(self, length: int) -> None:
        for slot in range(len(self._sources), length):
            counts = [len(slots) for slots in self._slots]
            candidates = [
                # Slot by which the source must have its next prompt, ceil((count + 1) / share), for integers.
                (-(-(count + 1) * self.period // share), source)
                for source, (count, share) in enumerate(zip(counts, self.shares, strict=True))
                if count * self.period < (slot + 1) * share
            ]
            source = min(candidates)[1]
            self._sources.append(source)
            self._slots[source].append(slot)
