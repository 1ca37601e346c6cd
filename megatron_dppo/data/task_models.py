"""The model folders of the embedded tasks: config and tokenizer of a tiny Qwen3-MoE, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_dppo.data.rare_words import KEYS, WORDS

SPECIAL = ("<pad>", "<bos>", "<eos>")
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
"""that of ``chain_sum``"""


def character_tokenizer() -> Tokenizer:
    """One token a character, and one for the opening of a boxed answer; ``<bos>`` in front."""
    tokenizer = _tokenizer([BOXED, *CHARACTERS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """One token for each key and word of the tasks with rare words; ``<bos>`` in front."""
    tokenizer = _tokenizer([_UNKNOWN, *KEYS, *WORDS])
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


def write_model_folder(task: str, folder: Path, head_dim: int = 16) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json.

    Args:
        task: ``chain_sum``, ``rare_words`` or ``rare_chain``; the last two have one folder.
        folder: is made.
        head_dim: vLLM's CPU attention has no heads of 16, but of 32.

    Raises:
        ValueError: no such task.
    """
    if task not in ("chain_sum", "rare_words", "rare_chain"):
        raise ValueError(f"task {task!r}; expected chain_sum, rare_words or rare_chain")
    if task == "chain_sum":
        tokenizer, sizes = character_tokenizer(), {}
    else:
        tokenizer = word_tokenizer()
        # Untied: a tied matrix would make the answer to a key look like the word that follows from it.
        sizes = {"max_position_embeddings": 16, "tie_word_embeddings": False}
        sizes["vocab_size"] = len(SPECIAL) + 1 + len(KEYS) + len(WORDS)
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
