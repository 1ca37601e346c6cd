"""A tiny model whose responses have a known text, and whose tokens are sampled all the same.

Each byte of a known response has two tokens, which decode to the same byte. Behind either of them the model samples
one of the two tokens of the next byte. The last token of the prompt decides which response begins: texts behind which
responses begin are tokens of their own. So random seeds give one text, with log-probabilities around -0.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engines.tiny import END, make_tiny
from tests.unit.scripted import TEMPLATE

Script = Mapping[str, str | Sequence[str]]
"""Responses by the text behind which they begin. Of several responses one is sampled."""
_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
_TWINS = 2
"""Tokens of each byte of a response."""
_MARKS = 0xF0000
"""First character of those that make the tokens of one byte different. They are not decoded."""
_EMBEDDING_SCALE = 24.0
"""Length of an embedding: far above that of what the layers add to it."""
_LOGIT_SCALE = 5.0
_NOISE = 0.04
"""Share of noise in the weights of the two tokens of a byte, so that they are not equally probable."""
CONTEXT = 8192


@dataclass(frozen=True)
class _Link:
    """A token of the chain."""

    text: str
    """String in the vocabulary."""
    state: int
    """Index of the state behind the token."""
    before: tuple[int, ...] = ()
    """States behind which it is sampled. None of them for the end of a prompt."""


class ChainModel:
    """The vocabulary and the weights for some scripts.

    Args:
        folder: Folder to create, with the model.
        scripts: Scripts by name. Each has a tokenizer; the model has the responses of all.
    """

    def __init__(self, folder: Path, scripts: Mapping[str, Script]) -> None:
        self.folder = folder
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._plain = [*_SPECIAL, *alphabet]
        self._num_states = 1
        self._endings: dict[tuple[str, str], int] = {}
        """Token of each text behind which responses begin, by script and text."""
        self._links: list[_Link] = []
        for name, script in scripts.items():
            for ending, responses in script.items():
                self._add(name, ending, [responses] if isinstance(responses, str) else responses)
        vocab_size = -(-(len(self._plain) + len(self._links)) // 64) * 64
        make_tiny(folder, seed=0, vocab_size=vocab_size)
        self.tokenizer("").save_pretrained(folder)
        self._write_weights()

    def tokenizer(self, script: str) -> PreTrainedTokenizerFast:
        """Return the tokenizer of a script; that of the server, which gets tokens, has none."""
        tokens = [*self._plain, *(link.text for link in self._links)]
        added = []
        for (name, ending), token in self._endings.items():
            if name == script:
                tokens[token] = ending
                added.append(AddedToken(ending, normalized=False, special=False))
        inner = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        marks = Regex(f"[{chr(_MARKS)}-{chr(_MARKS + 0xFFFD)}]")
        inner.decoder = decoders.Sequence([decoders.Replace(marks, ""), decoders.ByteLevel()])
        inner.add_tokens(added)
        pad, start, end = _SPECIAL
        made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=start, eos_token=end, pad_token=pad)
        made.chat_template = TEMPLATE
        return made

    def _add(self, name: str, ending: str, responses: Sequence[str]) -> None:
        first = self._new_state()
        self._endings[name, ending] = len(self._plain) + len(self._links)
        self._links.append(_Link(f"{chr(_MARKS)}ending {len(self._links)}", first))
        for response in responses:
            before = first
            characters = list(_byte_characters(response))
            for index, character in enumerate(characters):
                # State 0 is the end of every response.
                state = self._new_state() if index < len(characters) - 1 else 0
                for _ in range(_TWINS):
                    mark = chr(_MARKS + 1 + len(self._links))
                    self._links.append(_Link(f"{mark}{character}", state, (before,)))
                before = state

    def _new_state(self) -> int:
        self._num_states += 1
        return self._num_states - 1

    @torch.no_grad()
    def _write_weights(self) -> None:
        """Make the embedding of a token that of its state, and its logit large behind the states before it."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        generator = torch.Generator().manual_seed(0)

        def directions(rows: int) -> Tensor:
            drawn = torch.randn(rows, embeddings.shape[1], generator=generator)
            return drawn / drawn.norm(dim=1, keepdim=True)

        states = directions(self._num_states)
        noise = directions(len(self._links)) * _NOISE
        head.zero_()
        head[END] = states[0] * _LOGIT_SCALE
        for index, link in enumerate(self._links):
            token = len(self._plain) + index
            embeddings[token] = (states[link.state] + noise[index]) * _EMBEDDING_SCALE
            for before in link.before:
                head[token] = (states[before] + noise[index]) * _LOGIT_SCALE
        model.config.max_position_embeddings = CONTEXT
        model.save_pretrained(self.folder)


def _byte_characters(text: str) -> Iterator[str]:
    """Yield the character of the vocabulary for each byte of a text."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((characters, _),) = pre_tokenizer.pre_tokenize_str(text)
    yield from characters


def sampled_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, special ones included."""
    return tokenizer.decode(tokens, skip_special_tokens=False)
