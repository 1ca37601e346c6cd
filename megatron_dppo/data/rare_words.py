"""Embedded tasks with a long-tailed vocabulary: a key asks for words of thousands that the base model rarely gives.

``rare_words`` asks for one word, ``rare_chain`` for four. The right words of the 64 keys come from the tail of a Zipf
prior over 4,024 words and are the same in every run. The warm-up corpus has each right word with a small probability,
else a word by the prior: the base model spreads its mass over the vocabulary as a language model does, and what RL has
to raise are tokens of a few per cent. There is nothing to generalise to: the held-out prompts are the keys themselves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

NUM_KEYS, NUM_WORDS = 64, 4024
KEYS = [f"k{i:03d}" for i in range(NUM_KEYS)]
WORDS = [f"w{i:04d}" for i in range(NUM_WORDS)]
_FIRST_OF_TAIL = 200
_ANSWER_SEED = 0


@dataclass(frozen=True)
class RareWords:
    """One of the tasks."""

    num_words: int
    """of a right answer"""
    base_share: float
    """How often the warm-up corpus has a right word at its place."""
    _answers_seed: int = field(default=_ANSWER_SEED, repr=False)

    @cached_property
    def answers(self) -> dict[str, str]:
        """The right answer of each key: words with a space between them."""
        rng = random.Random(self._answers_seed)
        return {key: " ".join(rng.choice(WORDS[_FIRST_OF_TAIL:]) for _ in range(self.num_words)) for key in KEYS}

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """Prompt and response of one sample of the warm-up corpus."""
        key = rng.choice(KEYS)
        response = [
            word if rng.random() < self.base_share else rng.choices(WORDS, cum_weights=_ZIPF)[0]
            for word in self.answers[key].split()
        ]
        return key, " ".join(response)


_ZIPF = list(accumulate(1 / (rank + 1) for rank in range(NUM_WORDS)))
"""cumulative, not normalised"""
