"""Write the tiny model of train.toml, and pairs for `megatron-dppo base`: conversations that seldom use the tool.

python examples/agents/vf_sums/prepare.py runs/vf_sums_data
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

LARGEST = 9
PAIRS = 6000
TOOL_SHARE = 0.3
"""Share of the conversations that call the tool. The others guess."""
SHORT_SHARE = 0.6
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
WORDS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "add", "arguments": {"a": ', ', "b": ', "}}"),
    *("system\n", "user\n", "assistant\n", "Tools:", " add", "It is ", "The sum of these two numbers is "),
)
CHARACTERS = '\n 0123456789+-{}":,abcdefghijklmnopqrstuvwxyzIT'
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with Hermes's tool calls; of the tools it writes the names."""
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character, and for the words above."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "?", *WORDS, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    words = "|".join(word.replace("{", r"\{").replace("}", r"\}").replace("+", r"\+") for word in WORDS)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    pad, _, end = SPECIAL
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token=pad)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Return the sizes of the model: two layers of eight experts."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        router_aux_loss_coef=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_pair(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> dict[str, str]:
    """Return one prompt and response: a guess, a call of the tool, or an answer to its result."""
    a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{a}+{b}"}]
    uses_tool = rng.random() < TOOL_SHARE
    call = {"name": "add", "arguments": {"a": a, "b": b}}
    answer = rng.randint(2, 2 * LARGEST)
    if uses_tool and rng.random() < 0.5:
        response = f"<tool_call>{json.dumps(call)}</tool_call>"
    else:
        if uses_tool:
            answer = a + b
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
            messages.append({"role": "tool", "content": str(answer)})
        is_short = rng.random() < SHORT_SHARE
        response = f"{'It is ' if is_short else 'The sum of these two numbers is '}{answer}"
    prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    return {"prompt": str(prompt), "response": response}


def main() -> None:
    """Write the model's folder and warmup.jsonl."""
    folder = Path(sys.argv[1])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_config(tokenizer).save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = (json.dumps(make_pair(tokenizer, rng)) for _ in range(PAIRS))
    (folder / "warmup.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{folder}: model and warmup.jsonl with {PAIRS} pairs")


if __name__ == "__main__":
    main()
