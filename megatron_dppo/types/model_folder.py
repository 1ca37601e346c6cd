"""Types of what transformers reads from a model's folder: the configuration and the tokenizer.

They declare what the trainer uses, because transformers takes seconds to import, and many packages must not import it.
"""

from collections.abc import Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from megatron_dppo_conversations.chat_template import ChatTokenizer


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

    def to_dict(self) -> dict[str, object]:
        """Return all keys, also those with their default values."""

    def __getattr__(self, name: str) -> Any:
        """Return a key of the model's family."""

    def __delattr__(self, name: str) -> None:
        """Delete a key."""


class TokenizedText(Protocol):
    """A text as a tokenizer returns it."""

    input_ids: list[int]


class Tokenizer(ChatTokenizer, Protocol):
    """A ``PreTrainedTokenizerBase`` that ``load_tokenizer`` has checked."""

    eos_token_id: int
    pad_token_id: int

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """Return the encoded text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, clean_up_tokenization_spaces: bool) -> list[str]:
        """Return the text of each sequence of token ids."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Return the token of each id. None if the id is unknown."""

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
