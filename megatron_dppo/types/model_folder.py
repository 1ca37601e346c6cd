"""Types of what transformers reads from a model's folder: the configuration and the tokenizer.

They declare what the trainer uses, because transformers takes seconds to import, and many packages must not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol


class HfConfig(Protocol):
    """A ``PretrainedConfig`` that holds a language model.

    Keys that every family has are declared. ``__getattr__`` stands for those of one family.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    attribute_map: ClassVar[dict[str, str]]
    """Other names of keys -> names."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None

    def to_dict(self) -> dict[str, Any]:
        """Return all keys, also those with their default values."""

    def __getattr__(self, name: str) -> Any:
        """Return a key of the model's family."""

    def __delattr__(self, name: str) -> None:
        """Delete a key."""


class Tokenizer(Protocol):
    """A ``PreTrainedTokenizerBase`` that ``load_tokenizer`` has checked."""

    eos_token_id: int
    pad_token_id: int
    chat_template: str | None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """Return the encoded text. ``input_ids`` are its token ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
