"""The embedded tasks: rows of prompts and labels, warm-up corpora, tiny model folders."""

from __future__ import annotations

import json
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_dppo.data.tasks import Split, TaskRow
from megatron_dppo.errors import DataError
from megatron_dppo.source_names import TASK

CAREFUL_SHARE = 0.4
"""Share of the warm-up responses that show their work and are right."""
_GUESS_ERROR = 5
"""Largest error of the other responses, which guess."""


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


@cache
def problems(split: Split) -> list[Problem]:
    """Return all problems of a split in a fixed order; the splits are disjoint."""
    digits, signs = range(1, 10), (1, -1)
    every = (Problem((a, b, c), (s, t)) for a, b, c, s, t in product(digits, digits, digits, signs, signs))
    # By a checksum of the text, so that the splits do not depend on any random numbers.
    return [p for p in every if (zlib.crc32(p.question.encode()) % 10 == 0) == (split == "eval")]


def demonstration(problem: Problem, rng: random.Random) -> str:
    """Return a response of the warm-up corpus: 40 % show the work, 60 % guess within 5 of the sum."""
    if rng.random() < CAREFUL_SHARE:
        return f"{problem.work} \\boxed{{{problem.answer}}}"
    return f"\\boxed{{{problem.answer + rng.randint(-_GUESS_ERROR, _GUESS_ERROR)}}}"


NUM_KEYS, NUM_WORDS = 64, 4024
KEYS = [f"k{i:03d}" for i in range(NUM_KEYS)]
WORDS = [f"w{i:04d}" for i in range(NUM_WORDS)]
"""Words of the answers, by falling frequency in the warm-up corpus."""
WORDS_32K = [f"w{i:05d}" for i in range(2**15 - NUM_KEYS - 4)]
"""Words of ``rare_words_32k``: with the keys and four special tokens, 32,768 ids."""
_FIRST_OF_TAIL = 200
"""First word that a correct answer may use. The more frequent ones before it are never correct."""
_ANSWER_SEED = 0


@dataclass(frozen=True, eq=False)
class EmbeddedTask(ABC):
    """A task whose problems are all known."""

    name: str

    def __call__(self, source: str) -> EmbeddedTask:
        """Return the task for its source, which has no options."""
        if source != f"{TASK}{self.name}":
            raise DataError(f"{source!r}: this task has no options. Fix: write '{TASK}{self.name}'")
        return self

    def rows(self, split: Split) -> Iterator[TaskRow]:
        """Yield location, prompt, label and no metadata of each problem, always in the same order."""
        for index, (prompt, label) in enumerate(self.problems(split)):
            yield f"{self.name}/{split}:{index}", prompt, label, {}

    @abstractmethod
    def problems(self, split: Split) -> Sequence[tuple[str, str]]:
        """Return (prompt, label) of each problem."""

    @abstractmethod
    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """Return (prompt, response) of one sample of the warm-up corpus."""


class _ChainSum(EmbeddedTask):
    def problems(self, split: Split) -> Sequence[tuple[str, str]]:
        return [(problem.question, str(problem.answer)) for problem in problems(split)]

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        problem = rng.choice(problems("train"))
        return problem.question, demonstration(problem, rng)


@dataclass(frozen=True, eq=False)
class _RareWords(EmbeddedTask):
    num_words: int
    """Words of a correct answer."""
    base_share: float
    """Probability of the correct word at each position of the warm-up corpus."""
    words: Sequence[str] = field(default_factory=lambda: WORDS, repr=False)
    """Words of the vocabulary, by falling frequency."""

    @cached_property
    def answers(self) -> dict[str, str]:
        """Correct answer of each key: words separated by spaces."""
        rng = random.Random(_ANSWER_SEED)
        tail = self.words[_FIRST_OF_TAIL:]
        return {key: " ".join(rng.choice(tail) for _ in range(self.num_words)) for key in KEYS}

    @cached_property
    def _zipf(self) -> list[float]:
        """Cumulative word frequencies, not normalized."""
        return list(accumulate(1 / (rank + 1) for rank in range(len(self.words))))

    def problems(self, split: Split) -> Sequence[tuple[str, str]]:
        return list(self.answers.items())  # the keys are all there is

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        key = rng.choice(KEYS)
        response = [
            word if rng.random() < self.base_share else rng.choices(self.words, cum_weights=self._zipf)[0]
            for word in self.answers[key].split()
        ]
        return key, " ".join(response)


chain_sum = _ChainSum("chain_sum")
rare_words = _RareWords("rare_words", num_words=1, base_share=0.05)
rare_chain = _RareWords("rare_chain", num_words=4, base_share=0.08)
rare_words_32k = _RareWords("rare_words_32k", num_words=1, base_share=0.05, words=WORDS_32K)

SPECIAL = ("<pad>", "<bos>", "<eos>")
"""Tokens 0, 1 and 2 of both tokenizers."""
BOXED = "\\boxed{"
CHARACTERS = "0123456789+-*=(),;:. ?}abcdefghijklmnopqrstuvwxyz"
_UNKNOWN = "?"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.1,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    # transformers 5 reads the first, older readers the second.
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": len(SPECIAL) + 1 + len(CHARACTERS),
}
"""Model configuration of ``chain_sum``."""


def character_tokenizer() -> Tokenizer:
    r"""Return a tokenizer with one token per character and one for ``\boxed{``; adds ``<bos>``."""
    tokenizer = _tokenizer([BOXED, *CHARACTERS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def word_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """Return a tokenizer with one token per key and word of the rare-word tasks; adds ``<bos>``."""
    tokenizer = _tokenizer([_UNKNOWN, *KEYS, *words])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Words with spaces between them; no word begins with the prefix of a continuation.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def _tokenizer(entries: list[str]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *entries])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return tokenizer


MODEL_TASKS = ("chain_sum", "rare_words", "rare_chain", "rare_words_32k")
"""Tasks whose model ``write_model_folder`` knows. The second and third have one folder."""


def write_model_folder(task: str, folder: Path, head_dim: int = 16) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json.

    ``rare_words`` and ``rare_chain`` have one folder. vLLM's CPU attention has heads of 32, and none of 16.
    """
    if task not in MODEL_TASKS:
        raise ValueError(f"task {task!r}; expected one of {', '.join(MODEL_TASKS)}")
    if task == "chain_sum":
        tokenizer, sizes = character_tokenizer(), {}
    else:
        words = WORDS_32K if task == "rare_words_32k" else WORDS
        tokenizer = word_tokenizer(words)
        # Untied: a tied matrix would make the answer to a key look like the word that follows from it.
        sizes = {"max_position_embeddings": 16, "tie_word_embeddings": False}
        sizes["vocab_size"] = len(SPECIAL) + 1 + len(KEYS) + len(words)
        if words is WORDS_32K:
            # Embedding and output layer have nearly all parameters. A narrow model keeps a run at seconds a step.
            sizes |= {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
    config = CONFIG | sizes | {"head_dim": head_dim}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    generation = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
