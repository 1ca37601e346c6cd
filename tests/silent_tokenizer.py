"""A tokenizer for engines of tests that read no text."""

from __future__ import annotations


class SilentTokenizer:
    """Decode everything to the empty text; two special tokens."""

    eos_token_id = 1
    pad_token_id = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""
