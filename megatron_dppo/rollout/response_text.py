"""Text of a response: without special tokens, but with the tags that rewards and agents read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from megatron_dppo.rewards.answers.thinking import THINKING_TAGS

_TAGS = frozenset(tag for pair in THINKING_TAGS for tag in pair) | {"<tool_call>", "</tool_call>"}
_special_ids: WeakKeyDictionary[Any, tuple[frozenset[int], frozenset[int]]] = WeakKeyDictionary()
"""Ids of the special tokens of a tokenizer that leave the text, and of those that stay in it."""


def decode_response(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of a response without special tokens.

    Tags of thoughts and tool calls stay, although some tokenizers list them as special tokens: without them a reward
    would take the thought for the answer.
    """
    dropped, tags = _split_special_ids(tokenizer)
    if tags.isdisjoint(token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    # ``skip_special_tokens`` would drop the tags, so the other special tokens are removed here.
    return tokenizer.decode([each for each in token_ids if each not in dropped], skip_special_tokens=False)


def _split_special_ids(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    known = _special_ids.get(tokenizer)
    if known is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if token.special}
        tags = frozenset(index for index in special if str(added[index]) in _TAGS)
        dropped = frozenset(special | set(getattr(tokenizer, "all_special_ids", ()))) - tags
        known = _special_ids[tokenizer] = (dropped, tags)
    return known
