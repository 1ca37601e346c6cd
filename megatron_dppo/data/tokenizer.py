"""The tokenizer of a model folder."""

from __future__ import annotations

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
