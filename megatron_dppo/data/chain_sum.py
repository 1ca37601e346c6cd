r"""The embedded task: sums of three one-digit terms, answered in ``\boxed{}``.

The task is reasoning-gym's ``chain_sum`` with our own generator. There are 2,916 problems (9 * 9 * 9 terms, 2 * 2
signs); a checksum of the question holds a tenth of them back for evaluation. The warm-up corpus mixes two habits, as a
web-trained base does: showing the work (always right) and guessing (rarely right). RL has to find out which one pays.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from itertools import product
from typing import Literal

CAREFUL_SHARE = 0.4
_GUESS_ERROR = 5

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Problem:
    """One sum, for example ``7+8-3=``."""

    terms: tuple[int, int, int]
    signs: tuple[int, int]

    @property
    def question(self) -> str:
        """The prompt."""
        first, second, third = self.terms
        return f"{first}{_symbol(self.signs[0])}{second}{_symbol(self.signs[1])}{third}="

    @property
    def partial(self) -> int:
        """The sum of the first two terms."""
        return self.terms[0] + self.signs[0] * self.terms[1]

    @property
    def answer(self) -> int:
        """The sum."""
        return self.partial + self.signs[1] * self.terms[2]

    @property
    def work(self) -> str:
        """The steps, for example ``7+8=15,15-3=12``."""
        first, second, third = self.terms
        return (
            f"{first}{_symbol(self.signs[0])}{second}={self.partial},"
            f"{self.partial}{_symbol(self.signs[1])}{third}={self.answer}"
        )


def _symbol(sign: int) -> str:
    return "+" if sign > 0 else "-"


def problems(split: Split) -> list[Problem]:
    """All problems of a split, in a fixed order; no problem is in both."""
    digits, signs = range(1, 10), (1, -1)
    every = (Problem((a, b, c), (s, t)) for a, b, c, s, t in product(digits, digits, digits, signs, signs))
    return [p for p in every if (zlib.crc32(p.question.encode()) % 10 == 0) == (split == "eval")]


def demonstration(problem: Problem, rng: random.Random) -> str:
    """One response of the warm-up corpus: 40 % show the work, 60 % guess within 5 of the truth."""
    if rng.random() < CAREFUL_SHARE:
        return f"{problem.work} \\boxed{{{problem.answer}}}"
    return f"\\boxed{{{problem.answer + rng.randint(-_GUESS_ERROR, _GUESS_ERROR)}}}"
