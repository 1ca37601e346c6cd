"""Text of a response: without special tokens, but with the tags that rewards and agents read."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo_answers.thinking import THINKING_TAGS
from megatron_dppo_conversations.formats import choose_format

_TAGS = frozenset(tag for pair in THINKING_TAGS for tag in pair) | {"<tool_call>", "</tool_call>"}
_special_ids: WeakKeyDictionary[Tokenizer, dict[frozenset[str], tuple[frozenset[int], frozenset[int]]]] = (
    WeakKeyDictionary()
)
"""Ids of the special tokens of a tokenizer that leave the text, and of those that stay in it, by the kept tokens."""


def decode_response(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a response as rewards, judges and user functions read it.

    The model's chat template says in which format it is. Channels become thoughts between tags and the answer behind
    them. Other special tokens leave the text.
    """
    response_format = choose_format(getattr(tokenizer, "chat_template", None))
    return response_format.answer_text(decode_tokens(tokenizer, token_ids, response_format.text_tokens))


def decode_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], text_tokens: frozenset[str] = frozenset()) -> str:
    """Return the text of tokens without special tokens.

    Tags of thoughts and tool calls stay, although some tokenizers list them as special tokens: without them a reward
    would take the thought for the answer.
    """
    dropped, tags = _split_special_ids(tokenizer, text_tokens)
    if tags.isdisjoint(token_ids):
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    # ``skip_special_tokens`` would drop the tags, so the other special tokens are removed here.
    return tokenizer.decode([each for each in token_ids if each not in dropped], skip_special_tokens=False)


def _split_special_ids(tokenizer: Any, text_tokens: frozenset[str]) -> tuple[frozenset[int], frozenset[int]]:
    by_tokens = _special_ids.setdefault(tokenizer, {})
    known = by_tokens.get(text_tokens)
    if known is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if token.special}
        tags = frozenset(index for index in special if str(added[index]) in _TAGS | text_tokens)
        dropped = frozenset(special | set(getattr(tokenizer, "all_special_ids", ()))) - tags
        known = by_tokens[text_tokens] = (dropped, tags)
    return known
