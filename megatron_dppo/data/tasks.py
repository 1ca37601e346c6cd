"""The embedded tasks by their source names: rows of prompts and labels, and a warm-up corpus."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from megatron_dppo.data import chain_sum
from megatron_dppo.data.chain_sum import Split
from megatron_dppo.data.rare_words import RareWords

PREFIX = "task:"


class Task(Protocol):
    """An embedded task."""

    def rows(self, split: Split) -> Sequence[tuple[str, str]]:
        """(prompt, label) of each problem, always in the same order."""
        ...

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """(prompt, response) of one sample of the warm-up corpus."""
        ...


class _ChainSum:
    @cached_property
    def _problems(self) -> list[chain_sum.Problem]:
        return chain_sum.problems("train")

    def rows(self, split: Split) -> Sequence[tuple[str, str]]:
        return [(problem.question, str(problem.answer)) for problem in chain_sum.problems(split)]

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        problem = rng.choice(self._problems)
        return problem.question, chain_sum.demonstration(problem, rng)


class _Rare:
    def __init__(self, task: RareWords) -> None:
        self._task = task

    def rows(self, split: Split) -> Sequence[tuple[str, str]]:
        del split  # the keys are all there is
        return list(self._task.answers.items())

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        return self._task.demonstration(rng)


TASKS: Mapping[str, Task] = {
    f"{PREFIX}chain_sum": _ChainSum(),
    f"{PREFIX}rare_words": _Rare(RareWords(num_words=1, base_share=0.05)),
    f"{PREFIX}rare_chain": _Rare(RareWords(num_words=4, base_share=0.08)),
}
"""Source -> task."""
