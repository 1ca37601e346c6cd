"""A gated shared expert (Qwen2-MoE) on a CPU without AMX, where SGLang alone would launch a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.engines.calls import SHORT, ask, call
from tests.engines.checks import check_logprobs
from tests.engines.servers import Engine, SharedEngine, start_sglang
from tests.engines.tiny import EXPERTS, LAYERS, ROUTING, SPECIAL, TOP_K, VOCAB, Reference, byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny Qwen2-MoE with biases on q, k and v, tied embeddings and a shared expert of another size."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_moe"
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        qkv_bias=True,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    made = Qwen2MoeForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):  # made as zeros, which would hide one that is left out
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder)
    byte_tokenizer(SPECIAL).save_pretrained(folder)
    return Reference(folder)


@pytest.fixture(scope="module", params=["0.5.23", "0.5.20"])
def server(
    request: pytest.FixtureRequest, model: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An SGLang server of this model."""
    log: Path = tmp_path_factory.mktemp("sglang") / "log"
    options = ("--enable-return-routed-experts",)
    with SharedEngine(lambda: start_sglang(model.folder, log, *options, version=request.param)) as shared:
        yield shared.engine()


def test_shared_expert_tied_head_and_biases_equal_those_of_transformers(server: Engine, model: Reference) -> None:
    check_logprobs(server, model, 1.0)
    answer = call(server, lambda client: client.generate(ask(SHORT, 20, routing=ROUTING)))
    model.check_experts(answer.routed_experts, [*SHORT, *answer.token_ids.tolist()])
