"""The tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.errors import CheckpointError


def load_tokenizer(path: str | Path) -> Any:
    """The transformers tokenizer of a folder; local files only, no remote code.

    Raises:
        CheckpointError: the folder has no tokenizer, or one without an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(f"model.path = {str(path)!r} has no tokenizer; expected tokenizer.json in the folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"the tokenizer in {folder} has no eos_token; rollouts would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token on its own, as it stands within a text: a word's first token keeps its space."""
    if not ids:
        return []
    known = tokenizer.convert_ids_to_tokens(list(ids))
    # Two of the same: what a tokenizer strips at the start of a text is there in the second.
    once = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    twice = tokenizer.batch_decode([[i, i] for i in ids], clean_up_tokenization_spaces=False)
    texts = [two[len(one) :] if two.startswith(one) else one for one, two in zip(once, twice, strict=True)]
    return [text if text else str(name) for text, name in zip(texts, known, strict=True)]
