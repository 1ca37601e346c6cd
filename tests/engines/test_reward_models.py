"""``reward_model`` on real servers of a tiny Qwen3ForSequenceClassification: the scores of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer
from tests.engines.servers import Engine, SharedEngine, start_sglang, start_vllm
from tests.engines.tiny import END, SPECIAL, byte_tokenizer, make_tiny

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
ITEMS = [
    RewardItem(prompt=f"{i} plus {i}?", completion="so " * i + str(2 * i), label="", messages=chat)
    for i, chat in enumerate([None, None, ({"role": "user", "content": "1+1"},), None, None, None])
]


def make_model(folder: Path, labels: int, *, bias: bool = False) -> Path:
    """Random weights, with scores of the order of 1.

    Args:
        folder: is made.
        labels: classes.
        bias: write a bias of zeros for the head: SGLang's has one, random where the file has none.
    """
    torch.manual_seed(labels)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        num_labels=labels,
        initializer_range=0.2,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    if bias:
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {"score.bias": torch.zeros(labels)}, folder / "model.safetensors", {"format": "pt"})
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def expected(folder: Path, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> torch.Tensor:
    """[samples, labels] logits of transformers in float32, each sample by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for item in ITEMS:
        if chat:
            messages = list(item.messages or ({"role": "user", "content": item.prompt},))
            messages.append({"role": "assistant", "content": item.completion})
            text = "".join(f"<s>{m['role']}:{m['content']}</s>" for m in messages)
        else:
            text = item.prompt + item.completion
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            rows.append(model(ids).logits[0])
    return torch.stack(rows)


def scores(engine: Engine, **options: Any) -> torch.Tensor:
    spec = FunctionSpec("reward_model", options={"url": engine.url, "batch_size": 4, **options})
    scorer = RewardScorer(spec, 120.0, 1)
    try:
        results = scorer.score(ITEMS)
    finally:
        scorer.close()
    assert not any(result.failed for result in results), [result.error for result in results]
    return torch.tensor([result.reward for result in results])


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-3, (found, wanted)
    assert wanted.std() > 0.05, "scores that are all alike would prove nothing"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("reward_models")
    return {"one": make_model(base / "one", 1), "two": make_model(base / "two", 2, bias=True)}


@pytest.mark.long
def test_vllm_scores_as_transformers_by_classify_pooling_and_chat(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, tokenizer = folders["one"], byte_tokenizer(SPECIAL)
    options = ("--runner", "pooling", "--served-model-name", "rm")
    options += ("--worker-extension-cls", "", "--weight-transfer-config", '{"backend": "nccl"}')
    with SharedEngine(lambda: start_vllm(folder, tmp_path / "log", *options)) as shared:
        engine = shared.engine()
        plain, chat = (expected(folder, tokenizer, chat=chat)[:, 0] for chat in (False, True))
        close(scores(engine, endpoint="vllm_classify", model="rm"), plain)
        close(scores(engine, endpoint="vllm_pooling"), plain)
        close(scores(engine, endpoint="vllm_classify", output="sigmoid"), plain.sigmoid())
        close(scores(engine, endpoint="vllm_classify", tokenizer=str(folder)), chat)
        close(scores(engine, endpoint="vllm_score"), plain)


def test_sglang_scores_as_transformers_by_classify_and_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, tokenizer = folders["two"], byte_tokenizer(SPECIAL)
    with SharedEngine(lambda: start_sglang(folder, tmp_path / "log", "--is-embedding")) as shared:
        engine = shared.engine()
        plain, chat = (expected(folder, tokenizer, chat=chat) for chat in (False, True))
        close(scores(engine, endpoint="sglang_classify", index=1), plain[:, 1])
        close(scores(engine, endpoint="sglang_classify", index=0, output="softmax"), plain.softmax(1)[:, 0])
        close(scores(engine, endpoint="sglang_classify", index=1, tokenizer=str(folder)), chat[:, 1])
        close(scores(engine, endpoint="openai_embeddings", index=0), plain[:, 0])


@pytest.mark.long
def test_a_judge_behind_sglang_scores_responses(tmp_path: Path) -> None:
    """Its weights are random: any text of its own counts, found by a pattern that is empty at the end."""
    folder = make_tiny(tmp_path / "judge", seed=0)
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    options = {"model": "judge", "prompt": "{prompt} {completion}", "system": "S", "max_tokens": 8}
    options |= {"samples": 2, "temperature": 1.0, "pattern": "()$", "choices": {"": 1.0}}
    log = tmp_path / "log"
    with SharedEngine(lambda: start_sglang(folder, log, "--served-model-name", "judge")) as shared:
        spec = FunctionSpec("judge", options=options | {"url": shared.engine().url})
        scorer = RewardScorer(spec, 120.0, 1)
        results = scorer.score(ITEMS[:3])
        scorer.close()
    assert [(result.failed, result.reward, result.error) for result in results] == [(False, 1.0, "")] * 3
