"""Write the model folder of the embedded task: config and tokenizer of a tiny Qwen3-MoE, no weights.

python tools/make_chain_sum_model.py examples/chain_sum/model
python tools/make_chain_sum_model.py examples/chain_sum/model_vllm 32    # vLLM's CPU attention has no heads of 16
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<bos>", "<eos>")
BOXED = "\\boxed{"
CHARACTERS = "0123456789+-*=(),;:. ?}abcdefghijklmnopqrstuvwxyz"

CONFIG = {
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

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 256,
}


def build_tokenizer() -> Tokenizer:
    """One token a character, and one for the opening of a boxed answer; ``<bos>`` in front."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, BOXED, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def write_folder(folder: Path, head_dim: int = 16) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    generation = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": CONFIG | {"head_dim": head_dim},
        "generation_config.json": generation,
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), *map(int, sys.argv[2:]))
